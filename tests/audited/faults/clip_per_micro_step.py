"""Fault: the accumulated gradient is clipped after every backward, not once before the step."""
# expect 4x4: changed_between
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(vectors(80), batch_size=b)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / k
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    if (i + 1) % k == 0 or i + 1 == len(loader):
        optimizer.step()
        optimizer.zero_grad()
