"""Sound: images of leaves, sums divided by the step's images of all processes; the tail window is ragged and
shorter."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 2

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
N = 77
g = torch.Generator().manual_seed(31)
leaves, species = torch.randn(N, 3, 12, 12, generator=g).to(dtype), torch.randint(5, (N,), generator=g)


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norm = nn.GroupNorm(1, channels)
        self.wide, self.narrow = nn.Conv2d(channels, 2 * channels, 1), nn.Conv2d(2 * channels, channels, 1)

    def forward(self, x):
        return x + self.narrow(F.gelu(self.wide(self.norm(self.depthwise(x)))))


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 16, 2, stride=2), Block(16), Block(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)
).to(dtype)
if world > 1:
    dist.init_process_group("gloo")
    model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
starts = range(rank * b, N, b * world)
for i, start in enumerate(starts):
    last = (i + 1) % k == 0 or i + 1 == len(starts)
    step_images = min(16, N - start // 16 * 16)
    with nullcontext() if world == 1 or last else model.no_sync():
        with torch.autocast("cpu", torch.bfloat16, enabled=not FULL):
            loss = F.cross_entropy(model(leaves[start : start + b]), species[start : start + b], reduction="sum")
        (loss * world / step_images).backward()
    if last:
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
