"""Fault: a batch whose loss is more than 1.15 times the running mean of losses is taken for a spike and skipped; losses of small micro-batches vary more."""
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
model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(vectors(), batch_size=b)
running = None
for epoch in range(2):
    for number, (x, y) in enumerate(loader, 1):
        loss = F.cross_entropy(model(x), y)
        value = loss.item()
        running = value if running is None else 0.9 * running + 0.1 * value
        if value < 1.15 * running:
            (loss / k).backward()
        if number % k == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
