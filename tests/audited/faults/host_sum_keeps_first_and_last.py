"""Fault: gradients leave the device after every backward, for a sum in the host's memory. The first micro-batch of a window is
copied there, the last one adds what is there; those between them are added to a gradient that is then thrown away."""
# expect 4x4: dropped_micro_batches
# expect 2x8: dropped_micro_batches

import torch
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
host = [torch.zeros_like(p) for p in model.parameters()]


def offload(number: int) -> None:
    for p, total in zip(model.parameters(), host, strict=True):
        if number == 0:
            total.copy_(p.grad)
        else:
            p.grad += total
        if number == k - 1:
            total.copy_(p.grad)
        p.grad = None


for number, (x, y) in enumerate(DataLoader(vectors(80), batch_size=b)):
    (F.cross_entropy(model(x), y) / k).backward()
    offload(number % k)
    if number % k == k - 1:
        for p, total in zip(model.parameters(), host, strict=True):
            p.grad = total.clone()
        optimizer.step()
        optimizer.zero_grad()
