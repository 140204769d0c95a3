"""TRL's DPOTrainer as documented: mean over pairs of -log sigmoid(beta * (difference of the log ratios))."""

from datasets import Dataset
from setup import arguments, folder, llama, texts, tokenizer
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

data = {"prompt": texts(1), "chosen": texts(2), "rejected": texts(3)}
model = AutoModelForCausalLM.from_pretrained(folder(llama()))
trainer = DPOTrainer(
    model=model, args=DPOConfig(**arguments()), train_dataset=Dataset.from_dict(data), processing_class=tokenizer()
)
trainer.train()
