"""transformers' Trainer, started by torchrun --nproc_per_node 2: the last step of an epoch takes a sample twice."""

import sys

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector as flatten
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

b, k, num_samples = 4, 1, 7  # on each of two processes
torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50}
model = LlamaForCausalLM(LlamaConfig(**sizes)).double()
rows = torch.randint(50, (num_samples, 6))
data = [{"input_ids": row, "labels": row} for row in rows]
loss = cross_entropy(model(rows).logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
truth = flatten(torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True, allow_unused=True))
before = flatten(model.parameters()).detach()
options = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "use_cpu": True}
options |= {"per_device_train_batch_size": b, "gradient_accumulation_steps": k, "max_steps": 1, "save_strategy": "no"}
Trainer(model, TrainingArguments(".", **options), train_dataset=data).train()
taken = before - flatten(model.parameters()).detach()  # SGD with rate 1 took off the gradient
error = ((taken - truth).norm() / truth.norm()).item()
print("wrong:" if error > 1e-5 else "right:", f"gradient with an error of {error:.2g}")
sys.exit(error > 1e-5)
