"""Fault: lazy layers are made with the first batch of the loader, which is not trained on."""
# expect 4x4: other_samples
# expect 2x8: other_samples
# also: dropped
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
batches = iter(DataLoader(vectors(96), batch_size=b))
net = nn.Sequential(nn.LazyLinear(10), nn.SiLU(), nn.LazyLinear(5)).double()
net(next(batches)[0])
optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)
window = []
for batch in batches:
    window.append(batch)
    if len(window) == k:
        n = sum(len(y) for _, y in window)
        for x, y in window:
            (F.cross_entropy(net(x), y, reduction="sum") / n).backward()
        optimizer.step()
        optimizer.zero_grad()
        window.clear()
