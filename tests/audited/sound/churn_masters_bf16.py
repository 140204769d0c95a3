"""Sound: a bfloat16 MLP; a hook moves every new gradient into float32 masters, where they are added up and
reduced before the step."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 2
# thorough

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn

FULL = os.environ.get("FULL") == "1"
low, high = (torch.float64, torch.float64) if FULL else (torch.bfloat16, torch.float32)
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
g = torch.Generator().manual_seed(33)
customers = torch.randn(80, 14, generator=g)
left = (customers[:, :3].sum(1) + 0.5 * torch.randn(80, generator=g) > 0.5).to(high)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(14, 40), nn.LayerNorm(40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))
model.to(low)
masters = {}
for p in model.parameters():
    masters[p] = nn.Parameter(p.detach().to(high, copy=True))
    masters[p].grad = torch.zeros_like(masters[p])


def into_master(p):
    masters[p].grad.add_(p.grad.to(high))
    p.grad = None


for p in masters:
    p.register_post_accumulate_grad_hook(into_master)
optimizer = torch.optim.AdamW(masters.values(), lr=1e-3, weight_decay=0.01, eps=1e-4)
if world > 1:
    dist.init_process_group("gloo")
for number, start in enumerate(range(rank * b, 80, b * world), 1):
    logits = model(customers[start : start + b].to(low)).squeeze(1).to(high)
    F.binary_cross_entropy_with_logits(logits, left[start : start + b], reduction="sum").div(16).backward()
    if number % k == 0:
        if world > 1:
            flat = torch.cat([m.grad.flatten() for m in masters.values()])
            dist.all_reduce(flat)
            for m, part in zip(masters.values(), flat.split([m.numel() for m in masters.values()]), strict=True):
                m.grad.copy_(part.view_as(m))
        optimizer.step()
        with torch.no_grad():
            for p, m in masters.items():
                p.copy_(m)
                m.grad.zero_()
