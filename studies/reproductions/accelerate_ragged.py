"""Accelerate's documented loop on texts of different lengths: micro-batches weigh alike, whatever tokens they hold."""

import sys

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector as flatten
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

b, k = 2, 2
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50)).double()
texts = [torch.randint(50, (length,)) for length in (2, 3, 12, 11)]
loss = cross_entropy(torch.cat([model(text[:-1]) for text in texts]), torch.cat([text[1:] for text in texts]))
truth, before = flatten(torch.autograd.grad(loss, model.parameters())), flatten(model.parameters()).detach()

accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
loader = DataLoader(texts, b, collate_fn=lambda texts: pad_sequence(texts, batch_first=True, padding_value=-100))
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(cross_entropy(model(batch[:, :-1].clamp(0)).flatten(0, 1), batch[:, 1:].flatten()))
        optimizer.step()
        optimizer.zero_grad()
taken = before - flatten(model.parameters()).detach()  # SGD with rate 1 took off the gradient
error = ((taken - truth).norm() / truth.norm()).item()
print("wrong:" if error > 1e-5 else "right:", f"gradient with an error of {error:.2g}")
sys.exit(error > 1e-5)
