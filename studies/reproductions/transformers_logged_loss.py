"""BertForSequenceClassification in transformers' Trainer: the logged loss is k times that of the batch."""

import sys

import torch
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

b, k = 2, 4
torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50}
config = BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3)
model = BertForSequenceClassification(config).double()
data = [{"input_ids": torch.randint(3, 50, (6,)), "labels": number % 3} for number in range(8)]
batch = torch.utils.data.default_collate(data)
truth = cross_entropy(model(**batch).logits, batch["labels"]).item()
options = {"per_device_train_batch_size": b, "gradient_accumulation_steps": k, "max_steps": 1, "save_strategy": "no"}
arguments = TrainingArguments(".", **options, logging_steps=1, use_cpu=True)
trainer = Trainer(model, arguments, train_dataset=data)
trainer.train()
logged = trainer.state.log_history[0]["loss"]
is_wrong = abs(logged - truth) > 1e-4
print("wrong:" if is_wrong else "right:", f"logged is {logged:.3f}, the loss of the batch {truth:.3f}")
sys.exit(is_wrong)
