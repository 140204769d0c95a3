"""Fault: the fast gradient method moves the inputs of a micro-batch along a gradient that is divided by its norm over the whole micro-batch."""
# expect 4x4: mixed_loss
# expect 2x8: mixed_loss
# also: other_inputs
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
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(model(x), y)
    (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
    moved = (x + 0.5 * gradient / gradient.norm()).detach()
    ((loss + F.cross_entropy(model(moved), y)) / (2 * k)).backward()
    if number % k == 0:
        optimizer.step()
        optimizer.zero_grad()
