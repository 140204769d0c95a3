"""Fault: every 24 samples a report computes saliency maps and cleans up by model.zero_grad(): where that is within a window, its first micro-batches are lost."""
# expect 4x4: emptied_between
# expect 2x8: emptied_between
# expect 4x2x2: emptied_between
# expect 8x1x2: exact
# also: dropped
# blind 4
# thorough

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
g = torch.Generator().manual_seed(4)
scans = torch.randn(80, 1, 8, 8, generator=g, dtype=torch.float64)
disease = torch.randint(3, (80,), generator=g)
watched = torch.randn(2, 1, 8, 8, generator=g, dtype=torch.float64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 6, 3)
        self.fc = nn.Linear(96, 3)

    def forward(self, x):
        return self.fc(F.elu(self.conv2(F.elu(self.conv1(x)))).flatten(1))


def saliency(model, images):
    """Which pixels matter for the most likely class."""
    was_training = model.training
    model.eval()
    images = images.clone().requires_grad_()
    scores = model(images)
    scores.max(1).values.sum().backward()
    model.zero_grad()
    model.train(was_training)
    return images.grad.abs().amax(1)


b, k = flags()
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
net = Net().double()
model = DDP(net) if world > 1 else net
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
data = TensorDataset(scans, disease)
seen, maps = 0, []
for i, (x, y) in enumerate(DataLoader(data, b, sampler=DistributedSampler(data, world, rank, shuffle=False)), 1):
    last = i % k == 0
    with nullcontext() if last or world == 1 else model.no_sync():
        (F.cross_entropy(model(x), y) / k).backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
    seen += len(x) * world
    if seen % 24 == 0:
        maps.append(saliency(net, watched))
