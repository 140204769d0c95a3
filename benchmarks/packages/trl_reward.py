"""TRL's RewardTrainer as documented: mean over pairs of -log sigmoid(reward of the chosen - reward of the rejected)."""

from datasets import Dataset
from setup import arguments, llama, texts, tokenizer
from transformers import LlamaForSequenceClassification
from trl import RewardConfig, RewardTrainer

data = {"chosen": texts(2), "rejected": texts(3)}
model = llama(LlamaForSequenceClassification, num_labels=1)
trainer = RewardTrainer(
    model=model, args=RewardConfig(**arguments()), train_dataset=Dataset.from_dict(data), processing_class=tokenizer()
)
trainer.train()
