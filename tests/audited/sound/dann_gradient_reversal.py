"""Sound: a gradient reversal layer whose strength grows with steps; sources and targets alternate, so that half
of every micro-batch has a class."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 3
# thorough

import contextlib
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.strength * gradient, None


class DANN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, 8, 5), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(32, 16), nn.ReLU()
        )
        self.label, self.domain = nn.Linear(16, 4), nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x, strength):
        features = self.features(x)
        return self.label(features), self.domain(Reverse.apply(features, strength)).squeeze(-1)


b, k = flags()
g = torch.Generator().manual_seed(51)
is_source = torch.arange(80) % 2 == 0
signals = torch.randn(80, 1, 24, generator=g, dtype=torch.float64) + 0.7 * is_source[:, None, None]
machine_state = torch.randint(4, (80,), generator=g)

torch.manual_seed(0)
model = DANN().double()
if world > 1:
    dist.init_process_group("gloo")
    model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
steps, total = 0, 5
for i, start in enumerate(range(rank * b, 80, b * world)):
    rows = slice(start, start + b)
    strength = 2 / (1 + math.exp(-10 * steps / total)) - 1 + 0.1
    sync = (i + 1) % k == 0
    with contextlib.nullcontext() if sync or world == 1 else model.no_sync():
        logits, domain = model(signals[rows], strength)
        source = is_source[rows]
        label_loss = F.cross_entropy(logits[source], machine_state[rows][source])
        domain_loss = F.binary_cross_entropy_with_logits(domain, source.double())
        ((label_loss + domain_loss) / k).backward()
    if sync:
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
