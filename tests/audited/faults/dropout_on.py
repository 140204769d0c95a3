"""Fault: dropout 0.1: the random stream is consumed in another order under another cut, so other units are
dropped."""
# expect 4x4: dropout

import torch
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
model = mlp(p=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(vectors(80), batch_size=b)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / k
    loss.backward()
    if (i + 1) % k == 0 or i + 1 == len(loader):
        optimizer.step()
        optimizer.zero_grad()
