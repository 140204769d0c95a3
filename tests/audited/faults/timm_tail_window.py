"""Fault, as in an image classification script in wide use: for the last window of an epoch the number of micro-batches of a
window is replaced by what is left, and so is the divisor of the question whether a step is due, which then says yes too early:
the last window is taken in two steps."""
# expect 4x4: num_steps
# expect 2x8: num_steps

import torch
import torch.nn.functional as F
from common_models import flags, images
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(64, 5)).double()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
loader = DataLoader(images(44), batch_size=b)
for epoch in range(2):
    last_accum_steps = len(loader) % k
    last_batch_idx_to_accum = len(loader) - last_accum_steps
    last_batch_idx = len(loader) - 1
    accum_steps = k
    for batch_idx, (x, y) in enumerate(loader):
        last_batch = batch_idx == last_batch_idx
        if batch_idx >= last_batch_idx_to_accum:
            accum_steps = last_accum_steps
        need_update = last_batch or (batch_idx + 1) % accum_steps == 0
        loss = F.cross_entropy(net(x), y)
        (loss / accum_steps).backward()
        if need_update:
            optimizer.step()
            optimizer.zero_grad()
