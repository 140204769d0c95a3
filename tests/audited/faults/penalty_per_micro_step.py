"""Fault: a penalty on the weights (not the biases) is added to every micro-batch's loss, after the division by k."""
# expect 4x4: penalty
# expect 2x8: penalty

import torch
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for number, (x, y) in enumerate(DataLoader(vectors(80), batch_size=b), 1):
    loss = F.cross_entropy(model(x), y) / k
    loss = loss + 1e-2 * sum(p.square().sum() for p in model.parameters() if p.ndim > 1)
    loss.backward()
    if number % k == 0:
        optimizer.step()
        optimizer.zero_grad()
