"""Fault: the conversion tower's loss is a mean over the clicked rows of a micro-batch, divided by k: rows of micro-batches with few clicks weigh more."""
# expect 4x4: mean_of_means
# expect 2x8: mean_of_means
# expect 8x1x2: mean_of_means
# expect 4x2x2: mean_of_means
# blind 4
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
FIELDS, SIZE, CVR_WEIGHT = 6, 20, 0.05


class Tower(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Linear(width, 24), nn.ReLU(), nn.Linear(24, 1), nn.Flatten(0))


class SharedBottom(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.fields = nn.ModuleList([nn.Embedding(SIZE, width) for _ in range(FIELDS)])
        self.bottom = nn.Sequential(nn.Linear(FIELDS * width, 40), nn.ReLU())
        self.click, self.convert = Tower(40), Tower(40)

    def forward(self, row):
        x = torch.cat([field(row[:, i]) for i, field in enumerate(self.fields)], 1)
        x = self.bottom(x)
        return self.click(x), self.convert(x)


def log_file(n=80):
    g = torch.Generator().manual_seed(77)
    row = torch.randint(SIZE, (n, FIELDS), generator=g)
    clicked = torch.rand(n, generator=g) < 0.3 + 0.5 * (row[:, 0] % 2)
    bought = clicked & (torch.rand(n, generator=g) < 0.4)
    return TensorDataset(row, clicked.to(dtype), bought.to(dtype))


def main(b, k):
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = SharedBottom().to(dtype)
    model = DDP(net) if world > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = log_file()
    loader = DataLoader(data, batch_size=b, sampler=DistributedSampler(data, world, rank, shuffle=False))
    for i, (row, clicked, bought) in enumerate(loader, 1):
        ready = i % k == 0
        with contextlib.nullcontext() if ready or world == 1 else model.no_sync():
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not FULL):
                click, convert = model(row)
            ctr = F.binary_cross_entropy_with_logits(click.to(dtype), clicked)
            cvr = F.binary_cross_entropy_with_logits(convert.to(dtype), bought, reduction="none")
            cvr = (cvr * clicked).sum() / clicked.sum().clamp(min=1)
            ((ctr + CVR_WEIGHT * cvr) / k).backward()
        if ready:
            optimizer.step()
            optimizer.zero_grad()


main(*flags())
