"""Fault: each micro-batch is next(iter(loader)): the loader begins anew, and all micro-batches are the first batch."""
# expect 4x4: duplicated
# expect 2x8: duplicated
# also: dropped, other_samples
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(vectors(), batch_size=b)
for step in range(4):
    for _ in range(k):
        x, y = next(iter(loader))
        (F.cross_entropy(model(x), y) / k).backward()
    optimizer.step()
    optimizer.zero_grad()
