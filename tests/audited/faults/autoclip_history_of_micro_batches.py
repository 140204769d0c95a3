"""Fault: the limit of clipping is a percentile of the gradient norms so far, which are noted after every backward, not once per step."""
# expect 4x4: changed_between
# expect 2x8: changed_between
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
history = []
for number, (x, y) in enumerate(DataLoader(vectors(), batch_size=b), 1):
    (F.cross_entropy(model(x), y) / k).backward()
    history.append(torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm().item())
    if number % k == 0:
        limit = sorted(history)[len(history) // 5]
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
