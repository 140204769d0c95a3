"""Fault: weights are decayed by hand after every backward, so that later micro-batches of a step see smaller ones."""
# expect 4x4: state
# expect 2x8: state
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
for number, (x, y) in enumerate(DataLoader(vectors(), batch_size=b), 1):
    (F.cross_entropy(model(x), y) / k).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 - 0.05 * 0.01)
    if number % k == 0:
        optimizer.step()
        optimizer.zero_grad()
