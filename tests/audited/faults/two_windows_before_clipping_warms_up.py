"""Fault: "for stability" the first epoch accumulates twice as many batches, which is decided by the batches that were seen, and
never happens with k = 1."""
# expect 4x4: num_steps
# expect 2x8: num_steps
# also: batch_size, other_samples
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
net = nn.Sequential(nn.Linear(12, 9), nn.GELU(), nn.Linear(9, 5)).double()
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.1)
size = done = 0
for i, (x, y) in enumerate(DataLoader(vectors(160), batch_size=b), 1):
    F.cross_entropy(net(x), y, reduction="sum").backward()
    size, done = size + len(y), done + 1
    warm = 2 * k < i <= 4 * k and k > 1
    if done == (2 * k if warm else k):
        for p in net.parameters():
            p.grad.div_(size)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        size = done = 0
