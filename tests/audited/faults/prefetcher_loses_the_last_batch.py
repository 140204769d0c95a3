"""Fault: a prefetcher loads one batch ahead, and ends with the loader: the batch that it holds is never returned, whose size depends on the layout."""
# expect 4x4: dropped
# expect 2x8: dropped
# also: last_window, other_samples, batch_size, duplicated
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


class Prefetcher:
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        batches = iter(self.loader)
        ready = next(batches)
        for following in batches:
            yield ready
            ready = following


loader = Prefetcher(DataLoader(vectors(80), batch_size=b))
for epoch in range(2):
    optimizer.zero_grad()
    count = 0
    for x, y in loader:
        (F.cross_entropy(model(x), y, reduction="sum") / (b * k)).backward()
        count += 1
        if count % k == 0:
            optimizer.step()
            optimizer.zero_grad()
    if count % k:
        optimizer.step()
