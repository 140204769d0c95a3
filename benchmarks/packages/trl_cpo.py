"""TRL's CPOTrainer (experimental) as documented, with its own loss, or SimPO's (cpo_alpha=0.0, as its documentation says)."""

import sys

from datasets import Dataset
from setup import arguments, folder, llama, texts, tokenizer
from transformers import AutoModelForCausalLM
from trl.experimental.cpo import CPOConfig, CPOTrainer

mode = sys.argv.pop(1)  # cpo or simpo
more = {"cpo": {}, "simpo": {"loss_type": "simpo", "cpo_alpha": 0.0}}[mode]
data = {"prompt": texts(1), "chosen": texts(2), "rejected": texts(3)}
model = AutoModelForCausalLM.from_pretrained(folder(llama()))
trainer = CPOTrainer(
    model=model,
    args=CPOConfig(**arguments(), **more),
    train_dataset=Dataset.from_dict(data),
    processing_class=tokenizer(),
)
trainer.train()
