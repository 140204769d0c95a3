"""TRL's SFTTrainer as documented, on conversations: the loss of all tokens, the assistant's, without padding, DFT, LoRA."""

import sys

from datasets import Dataset
from peft import LoraConfig
from setup import arguments, llama, texts, tokenizer
from trl import SFTConfig, SFTTrainer

mode = sys.argv.pop(1)  # plain, assistant, packed, padding_free, dft or lora
more = {
    "assistant": {"assistant_only_loss": True},
    "packed": {"packing": True, "max_length": 24},
    "padding_free": {"padding_free": True, "max_length": None},
    "dft": {"loss_type": "dft"},
}.get(mode, {})
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
    peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if mode == "lora" else None,
)
trainer.train()
