"""BertForMultipleChoice in transformers' Trainer: k micro-batches give k times the gradient of one batch."""

import sys

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector as flatten
from transformers import BertConfig, BertForMultipleChoice, Trainer, TrainingArguments

b, k = 2, 4
torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50}
config = BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3)
model = BertForMultipleChoice(config).double()
parameters = list(model.parameters())
data = [{"input_ids": torch.randint(3, 50, (4, 6)), "labels": number % 4} for number in range(8)]
batch = torch.utils.data.default_collate(data)
loss = cross_entropy(model(**batch).logits, batch["labels"])
truth = flatten(torch.autograd.grad(loss, parameters, materialize_grads=True, allow_unused=True))
before = flatten(parameters).detach()
options = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "use_cpu": True}
options |= {"per_device_train_batch_size": b, "gradient_accumulation_steps": k, "max_steps": 1, "save_strategy": "no"}
Trainer(model, TrainingArguments(".", **options), train_dataset=data).train()
taken = before - flatten(parameters).detach()  # SGD with rate 1 took off the gradient
error = ((taken - truth).norm() / truth.norm()).item()
print("wrong:" if error > 1e-5 else "right:", f"gradient {taken.norm() / truth.norm():.2f} times, error {error:.2g}")
sys.exit(error > 1e-5)
