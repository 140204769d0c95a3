"""TRL's SFTTrainer as documented, on conversations: the loss of all tokens, of the assistant's, or of packed rows."""

import sys

from datasets import Dataset
from setup import arguments, llama, texts, tokenizer
from trl import SFTConfig, SFTTrainer

mode = sys.argv.pop(1)  # plain, assistant or packed
more = {"plain": {}, "assistant": {"assistant_only_loss": True}, "packed": {"packing": True, "max_length": 24}}[mode]
rows = [
    [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    for question, answer in zip(texts(1), texts(2), strict=True)
]
model = llama()
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(**arguments(), **more),
    train_dataset=Dataset.from_dict({"messages": rows}),
    processing_class=tokenizer(),
)
trainer.train()
