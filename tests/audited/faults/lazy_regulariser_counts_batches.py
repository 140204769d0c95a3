"""Fault: a regulariser is computed lazily, at every fourth batch and with four times its weight; it counts micro-batches."""
# expect 4x4: penalty
# expect 2x8: penalty
# also: factor
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
for number, (x, y) in enumerate(DataLoader(vectors(), batch_size=b)):
    loss = F.cross_entropy(model(x), y)
    if number % 4 == 0:
        loss = loss + 4 * 0.01 * model[0].weight.square().sum()
    (loss / k).backward()
    if number % k == k - 1:
        optimizer.step()
        optimizer.zero_grad()
