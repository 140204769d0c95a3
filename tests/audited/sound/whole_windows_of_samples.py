"""What is no whole window of 16 samples is left out in every epoch, whatever the cut."""
# expect 4x4: exact
# expect 2x8: exact
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader, Subset

torch.manual_seed(0)
b, k = flags()
data = vectors(44)
net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5)).double()
optimizer = torch.optim.Adagrad(net.parameters(), lr=1e-2)
for epoch in range(3):
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch)).tolist()
    whole = order[: len(order) // (b * k) * (b * k)]
    for i, (x, y) in enumerate(DataLoader(Subset(data, whole), batch_size=b), 1):
        (F.cross_entropy(net(x), y) / k).backward()
        if i % k == 0:
            optimizer.step()
            optimizer.zero_grad()
