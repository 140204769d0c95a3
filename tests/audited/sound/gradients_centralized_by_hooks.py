"""Sound: hooks take the mean of each row from every new gradient of a matrix (gradient centralization): that is linear, and commutes with sums."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 4
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
from common_models import flags, images
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def centralize(grad):
    return grad - grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True)


def use_centralized_gradients(model):
    for p in model.parameters():
        if p.dim() > 1:
            p.register_hook(centralize)


torch.manual_seed(0)
b, k = flags()
net = nn.Sequential(
    nn.Conv2d(2, 10, 3), nn.GroupNorm(2, 10), nn.Mish(), nn.Conv2d(10, 10, 3), nn.Mish(), nn.Flatten(), nn.Linear(40, 5)
).double()
use_centralized_gradients(net)
if world > 1:
    dist.init_process_group("gloo")
data = images(80)
loader = DataLoader(data, batch_size=b, sampler=DistributedSampler(data, world, rank, shuffle=False))
model = DDP(net) if world > 1 else net
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
criterion = nn.CrossEntropyLoss()
for step, (image, label) in enumerate(loader, 1):
    whole = step % k == 0
    with contextlib.nullcontext() if whole or world == 1 else model.no_sync():
        loss = criterion(model(image), label)
        (loss / k).backward()
    if whole:
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
