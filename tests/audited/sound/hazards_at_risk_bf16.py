"""Sound: discrete-time survival: the sum over the intervals in which patients are at risk, divided by those of
the whole window and of all processes."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 3
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
PATIENTS, INTERVALS = 77, 10
g = torch.Generator().manual_seed(91)
covariates = torch.randn(PATIENTS, 15, generator=g).to(dtype)
duration = torch.randint(1, INTERVALS + 1, (PATIENTS,), generator=g)
died = torch.rand(PATIENTS, generator=g) < 0.6


def hazard_loss(logits, duration, died):
    """Each patient is at risk in the intervals up to the last; a death is an event of that one."""
    times = torch.arange(INTERVALS)
    at_risk = times < duration[:, None]
    event = (times == duration[:, None] - 1) & died[:, None]
    loss = F.binary_cross_entropy_with_logits(logits, event.to(logits.dtype), reduction="none")
    return (loss * at_risk).sum()


class Nnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(15, 40), nn.SiLU(), nn.LayerNorm(40), nn.Linear(40, 40), nn.SiLU())
        self.hazards = nn.Linear(40, INTERVALS)

    def forward(self, x):
        return self.hazards(self.body(x))


torch.manual_seed(0)
b, k = flags()
model = Nnet().to(dtype)
if world > 1:
    dist.init_process_group("gloo")
    model = DDP(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6)
for step in torch.arange(PATIENTS).split(16):
    at_risk = int(duration[step].sum())
    parts = step[rank::world].split(b)
    for part in parts:
        with contextlib.nullcontext() if part is parts[-1] or world == 1 else model.no_sync():
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not FULL):
                logits = model(covariates[part])
            (hazard_loss(logits.to(dtype), duration[part], died[part]) * world / at_risk).backward()
    optimizer.step()
    optimizer.zero_grad()
