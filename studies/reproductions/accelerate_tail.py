"""Accelerate's documented loop: the last window of an epoch is divided by k, though it has fewer micro-batches."""

import sys

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector as flatten
from torch.utils.data import DataLoader, TensorDataset

b, k = 2, 4
torch.manual_seed(0)
model = torch.nn.Linear(8, 3).double()
inputs, labels = torch.randn(3, 8).double(), torch.tensor([0, 1, 2])
loss = cross_entropy(model(inputs), labels)
truth, before = flatten(torch.autograd.grad(loss, model.parameters())), flatten(model.parameters()).detach()

accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
loader, optimizer = DataLoader(TensorDataset(inputs, labels), b), torch.optim.SGD(model.parameters(), lr=1.0)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(model):
        accelerator.backward(cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
taken = before - flatten(model.parameters()).detach()  # SGD with rate 1 took off the gradient
error = ((taken - truth).norm() / truth.norm()).item()
print("wrong:" if error > 1e-5 else "right:", f"gradient with an error of {error:.2g}")
sys.exit(error > 1e-5)
