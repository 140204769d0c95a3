"""Fault: an epoch has len(loader) // k steps; the batches that are left are thrown away in every epoch."""
# expect 4x4: dropped
# expect 2x8: dropped

import itertools

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
net = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5)).double()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
order = torch.Generator().manual_seed(5)
loader = DataLoader(vectors(40), batch_size=b, shuffle=True, generator=order)
for epoch in range(3):
    batches = iter(loader)
    num_updates = max(1, len(loader) // k)
    for _ in range(num_updates):
        window = list(itertools.islice(batches, k))
        size = sum(len(y) for _, y in window)
        for x, y in window:
            (F.cross_entropy(net(x), y, reduction="sum") / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    for _ in batches:
        pass  # an epoch ends with whole windows
