"""Fault: the elastic weight consolidation of the old task is added whole at every micro-batch, while the new
task's loss is divided by k."""
# expect 4x4: penalty
# expect 2x8: penalty
# expect 8x1x2: exact
# expect 4x2x2: penalty
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
b, k = flags()
g = torch.Generator().manual_seed(14)
digits = torch.randn(80, 20, generator=g).to(dtype)
labels = torch.randint(4, (80,), generator=g)


class EWC:
    """Remembers the weights after the old task, and how much each of them matters (the diagonal of Fisher's matrix)."""

    def __init__(self, model, strength):
        self.strength = strength
        g = torch.Generator().manual_seed(15)
        self.old = {n: p.detach() + 0.1 * torch.randn(p.shape, generator=g).to(p) for n, p in model.named_parameters()}
        self.fisher = {n: torch.rand(p.shape, generator=g).to(p) for n, p in model.named_parameters()}

    def __call__(self, model):
        parts = [(self.fisher[n] * (p - self.old[n]) ** 2).sum() for n, p in model.named_parameters()]
        return self.strength / 2 * torch.stack(parts).sum()


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 4)).to(dtype)
ewc = EWC(net, strength=7e-4)
model = net
if world > 1:
    dist.init_process_group("gloo")
    model = DDP(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
for i, start in enumerate(range(rank * b, 80, b * world)):
    update = (i + 1) % k == 0
    with contextlib.nullcontext() if update or world == 1 else model.no_sync():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not FULL):
            logits = model(digits[start : start + b])
        task = F.cross_entropy(logits.to(dtype), labels[start : start + b])
        loss = task / k + ewc(net)
        loss.backward()
    if update:
        optimizer.step()
        optimizer.zero_grad()
