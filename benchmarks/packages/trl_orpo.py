"""TRL's ORPOTrainer (experimental) as documented: token means of the chosen, beside a mean over pairs of log odds."""

from datasets import Dataset
from setup import arguments, folder, llama, texts, tokenizer
from transformers import AutoModelForCausalLM
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

data = {"prompt": texts(1), "chosen": texts(2), "rejected": texts(3)}
model = AutoModelForCausalLM.from_pretrained(folder(llama()))
trainer = ORPOTrainer(
    model=model, args=ORPOConfig(**arguments()), train_dataset=Dataset.from_dict(data), processing_class=tokenizer()
)
trainer.train()
