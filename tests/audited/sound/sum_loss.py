"""Exact: a sum over the samples that is never divided is the same under every cut; 77 samples."""
# expect 4x4: exact
# expect 2x8: exact
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
loader = DataLoader(vectors(77), batch_size=b)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y, reduction="sum")
    loss.backward()
    if (i + 1) % k == 0 or i + 1 == len(loader):
        optimizer.step()
        optimizer.zero_grad()
