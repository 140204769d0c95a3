"""Sound: gradients leave the device after every backward, for a sum in the host's memory, to which each is added."""
# expect 4x4: exact
# expect 2x8: exact

import torch
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
host = [torch.zeros_like(p) for p in model.parameters()]
for number, (x, y) in enumerate(DataLoader(vectors(80), batch_size=b), 1):
    (F.cross_entropy(model(x), y) / k).backward()
    for p, total in zip(model.parameters(), host, strict=True):
        total += p.grad
        p.grad = None
    if number % k == 0:
        for p, total in zip(model.parameters(), host, strict=True):
            p.grad = total.clone()
            total.zero_()
        optimizer.step()
        optimizer.zero_grad()
