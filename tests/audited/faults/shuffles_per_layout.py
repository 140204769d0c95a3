"""Fault: the loader's batches are shuffled as batches: how samples fall into steps depends on the batch size."""
# expect 4x4: other_samples

import torch
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
order = torch.arange(80).split(b)
order = [order[i].tolist() for i in torch.randperm(len(order), generator=torch.Generator().manual_seed(2))]
loader = DataLoader(vectors(80), batch_sampler=order)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / k
    loss.backward()
    if (i + 1) % k == 0 or i + 1 == len(loader):
        optimizer.step()
        optimizer.zero_grad()
