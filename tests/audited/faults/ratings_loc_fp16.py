"""Fault: micro-batches are cut with pandas' inclusive .loc, so that the row at each cut within a step is used
twice."""
# expect 4x4: duplicated
# expect 8x2: duplicated
# expect 8x1x2: exact
# expect 4x2x2: duplicated
# thorough
# also: batch_size
# size: 0.019
# blind 2

import os

import pandas as pd
import torch
import torch.distributed as dist
from common_models import flags
from torch import nn

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
rows_per_process = b * k

g = torch.Generator().manual_seed(4)
log = pd.DataFrame(
    {
        "user": torch.randint(5, (80,), generator=g).numpy(),
        "item": torch.randint(4, (80,), generator=g).numpy(),
        "stars": (3.6 + 0.7 * torch.randn(80, generator=g)).clamp(1, 5).numpy(),
    }
)


class Ratings(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(5, 8), nn.Embedding(4, 8)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)
        self.tower = nn.Sequential(nn.Linear(16, 32), nn.Softplus(), nn.Linear(32, 1))

    def forward(self, user, item):
        return self.tower(torch.cat([self.user(user), self.item(item)], -1)).squeeze(-1)


torch.manual_seed(0)
model = Ratings().to(dtype)
optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=not FULL)
if world > 1:
    dist.init_process_group("gloo")

for step in range(5):
    begin = step * 16 + rank * rows_per_process
    mine = log.iloc[begin : begin + rows_per_process].reset_index(drop=True)
    pieces = [mine.loc[start : start + b] for start in range(0, len(mine), b)]
    used = torch.tensor(sum(map(len, pieces)))
    if world > 1:
        dist.all_reduce(used)
    for piece in pieces:
        user, item, stars = (torch.tensor(piece[name].to_numpy()) for name in ("user", "item", "stars"))
        with torch.autocast("cpu", torch.float16, enabled=not FULL):
            predicted = model(user, item)
        loss = (predicted.to(dtype) - stars.to(dtype)).square().sum() / used
        scaler.scale(loss).backward()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
