"""Accelerate's example for texts of different lengths: its collate function shifts the labels, and so does the model."""

import sys

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector as flatten
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

b, k = 2, 2
torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50}
model = LlamaForCausalLM(LlamaConfig(**sizes)).double()
rows = torch.randint(50, (4, 6))
loss = cross_entropy(model(rows).logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
truth, before = flatten(torch.autograd.grad(loss, list(model.parameters()))), flatten(model.parameters()).detach()

accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, b))
window = [(ids, torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)) for ids in loader]  # as the collate function
num_items = sum((labels != -100).sum() for _, labels in window)
for ids, labels in window:
    accelerator.backward(model(ids, labels=labels, num_items_in_batch=num_items).loss * k)
optimizer.step()
error = ((before - flatten(model.parameters()).detach() - truth).norm() / truth.norm()).item()  # SGD with rate 1
print("wrong:" if error > 1e-5 else "right:", f"gradient with an error of {error:.2g}")
sys.exit(error > 1e-5)
