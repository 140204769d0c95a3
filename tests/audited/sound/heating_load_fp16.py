"""Sound: LSTM forecasts of several horizons in fp16 with a GradScaler: each series has its own number of known
hours, and they are counted."""
# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: exact
# blind 2
# thorough

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
world = int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()


class Houses(Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        t = torch.arange(30.0) / 4 + 6 * torch.rand((), generator=g)
        load = torch.sin(t) + 0.3 * torch.randn(30, generator=g)
        known = torch.arange(6) < torch.randint(1, 7, (), generator=g)
        return load[:24, None].to(dtype), load[24:].to(dtype), known


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.ahead = nn.LSTMCell(1, 20), nn.Linear(20, 6)

    def forward(self, x):
        state = None
        for hour in x.unbind(1):
            state = self.cell(hour, state)
        return self.ahead(state[0])


torch.manual_seed(0)
houses, model, sampler = Houses(), Forecast().to(dtype), None
if world > 1:
    dist.init_process_group("gloo")
    model, sampler = DistributedDataParallel(model), DistributedSampler(houses, shuffle=False)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=not FULL)
batches = list(DataLoader(houses, batch_size=b, sampler=sampler))
for first in range(0, len(batches), k):
    window = batches[first : first + k]
    hours = torch.tensor(sum(int(known.sum()) for *_, known in window))
    if world > 1:
        dist.all_reduce(hours)
    for position, (past, future, known) in enumerate(window):
        with nullcontext() if world == 1 or position == len(window) - 1 else model.no_sync():
            with torch.autocast("cpu", torch.float16, enabled=not FULL):
                ahead = model(past)
            error = nn.functional.smooth_l1_loss(ahead.to(dtype), future, reduction="none")
            scaler.scale((error * known).sum() * world / hours).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
