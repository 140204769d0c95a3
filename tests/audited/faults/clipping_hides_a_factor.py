"""Fault: not divided by k; but the whole gradient is clipped, so that the optimizer gets the right one all the
same."""
# expect 4x4: factor
# thorough
# weights: equal

import torch
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for i, (x, y) in enumerate(DataLoader(vectors(80), batch_size=b)):
    F.cross_entropy(model(x), y).backward()
    if (i + 1) % k == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
