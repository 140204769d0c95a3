"""Fault: dropout by a hash that is meant to be of the sample, but is of its place in the micro-batch."""
# expect 4x4: dropout
# expect 2x8: dropout
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch import nn
from torch.utils.data import DataLoader


class Dropout(nn.Dropout):
    def forward(self, x):
        if not self.training:
            return x
        places, features = torch.arange(len(x))[:, None], torch.arange(x.shape[1])
        draws = torch.frac(torch.sin((12.9898 * places + 78.233 * features).double()) * 43758.5453).abs()
        return x * (draws >= self.p) / (1 - self.p)


torch.manual_seed(0)
b, k = flags()
model = mlp(p=0.3)
for number in (3, 6):
    model[number] = Dropout(0.3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for i, (x, y) in enumerate(DataLoader(vectors(80), batch_size=b)):
    (F.cross_entropy(model(x), y) / k).backward()
    if i % k == k - 1:
        optimizer.step()
        optimizer.zero_grad()
