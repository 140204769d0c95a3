"""GPT2LMHeadModel in transformers' Trainer: the first label of a row, which nothing predicts, is counted."""

import sys

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector as flatten
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

b, k = 2, 2
torch.manual_seed(0)
sizes = {"n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50, "use_cache": False}
config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1)
model = GPT2LMHeadModel(config).double()
parameters = list(model.parameters())
rows = torch.randint(50, (4, 6))
data = [{"input_ids": row, "labels": row} for row in rows]
batch = torch.utils.data.default_collate(data)
loss = cross_entropy(model(**batch).logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
truth = flatten(torch.autograd.grad(loss, parameters, materialize_grads=True, allow_unused=True))
before = flatten(parameters).detach()
options = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "use_cpu": True}
options |= {"per_device_train_batch_size": b, "gradient_accumulation_steps": k, "max_steps": 1, "save_strategy": "no"}
Trainer(model, TrainingArguments(".", **options), train_dataset=data).train()
taken = before - flatten(parameters).detach()  # SGD with rate 1 took off the gradient
error = ((taken - truth).norm() / truth.norm()).item()
print("wrong:" if error > 1e-5 else "right:", f"gradient {taken.norm() / truth.norm():.2f} times, error {error:.2g}")
sys.exit(error > 1e-5)
