"""Fault: the filter that amplifies slow gradients (a running mean of the gradient is added to it) is called after every backward."""
# expect 4x4: changed_between
# expect 2x8: changed_between
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
slow = {}
for number, (x, y) in enumerate(DataLoader(vectors(), batch_size=b), 1):
    (F.cross_entropy(model(x), y) / k).backward()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.detach()
        slow[name] = 0.9 * slow[name] + 0.1 * gradient if name in slow else gradient.clone()
        parameter.grad = parameter.grad + 2.0 * slow[name]
    if number % k == 0:
        optimizer.step()
        optimizer.zero_grad()
