"""Fault: the seed is a hash of the settings, the micro-batch among them: the layouts begin with other weights."""
# expect 4x4: parameters
# expect 2x8: parameters

import zlib

import torch
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.utils.data import DataLoader

b, k = flags()
torch.manual_seed(zlib.crc32(f"{b}-{k}".encode()))
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for number, (x, y) in enumerate(DataLoader(vectors(80), batch_size=b), 1):
    (F.cross_entropy(model(x), y) / k).backward()
    if number % k == 0:
        optimizer.step()
        optimizer.zero_grad()
