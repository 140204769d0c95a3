"""Fault: gradients are added up in a buffer of bfloat16."""
# expect 4x4: low_precision
# expect 2x8: low_precision

import torch
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
buffers = [torch.zeros_like(p, dtype=torch.bfloat16) for p in model.parameters()]
for number, (x, y) in enumerate(DataLoader(vectors(80), batch_size=b), 1):
    (F.cross_entropy(model(x), y) / k).backward()
    for p, buffer in zip(model.parameters(), buffers, strict=True):
        buffer += p.grad.bfloat16()
        p.grad = None
    if number % k == 0:
        for p, buffer in zip(model.parameters(), buffers, strict=True):
            p.grad = buffer.double()
            buffer.zero_()
        optimizer.step()
        optimizer.zero_grad()
