"""Fault: `step % k == 0` with steps counted from 0: the first step sees one micro-batch and all windows are
shifted."""
# expect 4x4: first_window
# also: last_window

import torch
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(vectors(80), batch_size=b)
for step, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / k
    loss.backward()
    if step % k == 0:
        optimizer.step()
        optimizer.zero_grad()
