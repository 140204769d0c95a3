"""Each epoch ends with a smaller window, whose own samples divide it; three epochs, each in an order of its own."""
# expect 4x4: exact
# expect 2x8: exact

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
data = vectors(44)
net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5)).double()
optimizer = torch.optim.NAdam(net.parameters(), lr=1e-3)
for epoch in range(3):
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch)).tolist()
    batches = list(DataLoader([data[i] for i in order], batch_size=b))
    for first in range(0, len(batches), k):
        window = batches[first : first + k]
        size = sum(len(y) for _, y in window)
        for x, y in window:
            (F.cross_entropy(net(x), y, reduction="sum") / size).backward()
        optimizer.step()
        optimizer.zero_grad()
