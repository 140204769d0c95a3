"""An evaluation after every second optimizer step, in the middle of an epoch; gradients wait for nothing."""
# expect 4x4: exact
# expect 2x8: exact
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
net = nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.0), nn.Linear(8, 5)).double()
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
loader = DataLoader(vectors(80), batch_size=b)
steps = 0
for i, (x, y) in enumerate(loader, 1):
    net.train()
    (F.cross_entropy(net(x), y) / k).backward()
    if i % k == 0:
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps % 2 == 0:
            net.eval()
            with torch.no_grad():
                accuracy = sum((net(x).argmax(1) == y).sum().item() for x, y in loader) / 80
