"""Fault: a hook clips every parameter's gradient of every micro-batch."""
# expect 4x4: gradient_hooks
# expect 2x8: gradient_hooks

import torch
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
model = mlp()
for p in model.parameters():
    p.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for number, (x, y) in enumerate(DataLoader(vectors(80), batch_size=b), 1):
    (F.cross_entropy(model(x), y) / k).backward()
    if number % k == 0:
        optimizer.step()
        optimizer.zero_grad()
