"""Fault: the sampler takes its rank from SLURM's variables, but the job is started by torchrun: every process believes
to be number 0 of 1 and reads the same tiles."""

# expect 4x4: exact
# expect 8x1x2: not_sharded
# expect 4x2x2: not_sharded
# blind 7
# thorough
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

torch.manual_seed(0)
b, k = flags()


def setup():
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
        return dist.get_world_size()
    return 1


class Tiles(Dataset):
    def __init__(self, n=64):
        g = torch.Generator().manual_seed(1)
        self.image = torch.randn(n, 3, 8, 8, generator=g, dtype=torch.float64)
        self.mask = (self.image.sum(1) > 0).long()

    def __len__(self):
        return len(self.image)

    def __getitem__(self, i):
        return self.image[i], self.mask[i]


class TinyUNet(nn.Module):
    def __init__(self, width=6, classes=2):
        super().__init__()
        self.enc = nn.Conv2d(3, width, 3, padding=1)
        self.bottom = nn.Conv2d(width, width, 3, padding=1)
        self.dec = nn.Conv2d(2 * width, classes, 3, padding=1)

    def forward(self, x):
        e = F.relu(self.enc(x))
        d = F.interpolate(F.relu(self.bottom(F.max_pool2d(e, 2))), scale_factor=2.0)
        return self.dec(torch.cat([e, d], dim=1))


world = setup()
data = Tiles()
sampler = DistributedSampler(
    data,
    num_replicas=int(os.environ.get("SLURM_NTASKS", 1)),
    rank=int(os.environ.get("SLURM_PROCID", 0)),
    shuffle=True,
    seed=7,
)
model = TinyUNet().double()
if world > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
max_steps = len(data) // (b * k * world)
for i, (image, mask) in enumerate(DataLoader(data, batch_size=b, sampler=sampler)):
    if i == max_steps * k:
        break
    sync = (i + 1) % k == 0
    with nullcontext() if sync or world == 1 else model.no_sync():
        (F.cross_entropy(model(image), mask) / k).backward()
    if sync:
        optimizer.step()
        optimizer.zero_grad()
