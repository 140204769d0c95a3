"""Fault: a micro-batch has room for 9.5 points per trip on average, and trips that do not fit any more are left
out."""
# expect 4x4: dropped
# expect 4x2x2: dropped
# thorough
# also: batch_size
# size: 0.04
# blind 2

import os

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.nn.utils.rnn import pack_sequence

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
budget = 9.5 * b

g = torch.Generator().manual_seed(21)
trips = [torch.randn(int(n), 4, generator=g).to(dtype) for n in torch.randint(5, 12, (80,), generator=g)]
minutes = [4 + t[:, 0].mean() for t in trips]


class Arrival(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.out = nn.GRU(4, 20), nn.Linear(20, 1)

    def forward(self, trips):
        _, hidden = self.gru(pack_sequence(trips, enforce_sorted=False))
        return self.out(hidden[-1]).squeeze(-1)


def fitting(numbers):
    room = budget
    for i in numbers:
        if len(trips[i]) <= room:
            room -= len(trips[i])
            yield i


torch.manual_seed(0)
model = Arrival().to(dtype)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0, enabled=not FULL)
if world > 1:
    dist.init_process_group("gloo")
kept = torch.zeros((), dtype=dtype)
for number, start in enumerate(range(rank * b, 80, b * world), 1):
    chosen = list(fitting(range(start, start + b)))
    with torch.autocast("cpu", torch.float16, enabled=not FULL):
        predicted = model([trips[i] for i in chosen])
    truth = torch.stack([minutes[i] for i in chosen])
    scaler.scale((predicted.to(dtype) - truth).square().sum() / 16).backward()
    kept += len(chosen)
    if number % k == 0:
        if world > 1:
            for tensor in (kept, *(p.grad for p in model.parameters())):
                dist.all_reduce(tensor)
        scaler.unscale_(optimizer)
        for p in model.parameters():
            p.grad.mul_(16 / kept)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        kept.zero_()
