"""Sound: batch norm over ghost batches of 4 neighbours: every layout cuts between them, so that the statistics
are always the same."""
# expect 4x4: exact
# expect 8x2: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 2
# thorough

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from common_models import flags, images
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
photos = images(80)


class GhostNorm(nn.BatchNorm2d):
    def __init__(self, channels, ghost=4):
        super().__init__(channels, track_running_stats=False)
        self.ghost = ghost

    def forward(self, x):
        return torch.cat([super(GhostNorm, self).forward(part) for part in x.split(self.ghost)])


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(2, 8, 3, bias=False), GhostNorm(8), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False), GhostNorm(8), nn.ReLU(),
    nn.Flatten(), nn.Linear(32, 5),
).double()  # fmt: skip
if world > 1:
    dist.init_process_group("gloo")
    model = DDP(model, broadcast_buffers=False, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
for i, start in enumerate(range(rank * b, 80, b * world), 1):
    x, y = map(torch.stack, zip(*photos[start : start + b], strict=True))
    with nullcontext() if world == 1 or i % k == 0 else model.no_sync():
        (nn.functional.cross_entropy(model(x), y) / k).backward()
    if i % k == 0:
        optimizer.step()
        optimizer.zero_grad()
