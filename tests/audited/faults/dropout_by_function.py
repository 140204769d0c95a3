"""Fault: functional dropout in the forward."""
# expect 4x4: dropout
# expect 2x8: dropout
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(12, 32), nn.Linear(32, 32), nn.Linear(32, 5)

    def forward(self, x):
        x = F.dropout(torch.tanh(self.first(x)), 0.2, self.training)
        return self.last(F.dropout(torch.tanh(self.middle(x)), 0.2, self.training))


torch.manual_seed(0)
b, k = flags()
model = Net().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for number, (x, y) in enumerate(DataLoader(vectors(80), batch_size=b), 1):
    (F.cross_entropy(model(x), y) / k).backward()
    if number % k == 0:
        optimizer.step()
        optimizer.zero_grad()
