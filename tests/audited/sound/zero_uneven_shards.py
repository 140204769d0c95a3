"""Sound: ZeRO and DDP with 77 samples in uneven shards: the last step's processes have 8 and 5, weighted by
their numbers of samples."""
# expect 4x4: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# thorough
# blind 2

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
g = torch.Generator().manual_seed(53)
sensor, fault = torch.randn(77, 4, 25, generator=g).double(), torch.randint(4, (77,), generator=g)

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv1d(4, 12, 5), nn.InstanceNorm1d(12, affine=True), nn.ReLU(), nn.Conv1d(12, 12, 5, stride=2), nn.ReLU(),
    nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(24, 4),
).double()  # fmt: skip
if world > 1:
    dist.init_process_group("gloo")
    model = DDP(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=2e-3)
else:
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
shard = [range(start, min(start + b, 77)) for start in range(rank * b, 77, b * world)]
for first in range(0, len(shard), k):
    window = shard[first : first + k]
    here = sum(map(len, window))
    total = torch.tensor(here)
    if world > 1:
        dist.all_reduce(total)
    ours = here * world / total.item()  # DDP's average becomes one that is weighted by samples
    for rows in window:
        with nullcontext() if world == 1 or rows is window[-1] else model.no_sync():
            loss = nn.functional.cross_entropy(model(sensor[list(rows)]), fault[list(rows)])
            (ours * loss * len(rows) / here).backward()
    optimizer.step()
    decay.step()
    optimizer.zero_grad()
