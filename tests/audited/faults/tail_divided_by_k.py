"""Fault: the last window has fewer than k micro-batches (72 samples = 4 windows of 16 and one of 8) but is
divided by k."""
# expect 4x4: tail

import torch
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(vectors(72), batch_size=b)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / k
    loss.backward()
    if (i + 1) % k == 0 or i + 1 == len(loader):
        optimizer.step()
        optimizer.zero_grad()
