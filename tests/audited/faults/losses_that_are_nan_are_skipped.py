"""Fault: a batch whose loss is not finite is skipped: of a large batch all samples are lost, of micro-batches only those beside the broken one."""
# expect 4x4: dropped
# expect 2x8: dropped
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
data = vectors()
data[21][0][3] = float("nan")  # a broken recording
model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(data, batch_size=b)
for epoch in range(2):
    for number, (x, y) in enumerate(loader, 1):
        loss = F.cross_entropy(model(x), y)
        if torch.isfinite(loss):
            (loss / k).backward()
        if number % k == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
