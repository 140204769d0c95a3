"""Fault: every process takes a contiguous block of the windows of the stations, so that a step of two processes sees
other windows than a step of one."""

# expect 4x4: exact
# expect 8x1x2: other_samples
# expect 4x2x2: other_samples
# thorough
# blind 6
import os

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

HISTORY, HORIZON = 16, 4


def station_windows(stations=8, each=8):
    g = torch.Generator().manual_seed(5)
    t = torch.arange(HISTORY + HORIZON + each, dtype=torch.float64)
    rows = []
    for _ in range(stations):
        period, phase, level = torch.rand(3, generator=g, dtype=torch.float64)
        series = level * 3 + torch.sin(t / (1 + 3 * period) + 6 * phase)
        series = series + 0.1 * torch.randn(len(t), generator=g, dtype=torch.float64)
        rows += [series[s : s + HISTORY + HORIZON] for s in range(each)]
    w = torch.stack(rows)
    return TensorDataset(w[:, :HISTORY], w[:, HISTORY:])


class GRUForecaster(nn.Module):
    def __init__(self, hidden=12):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, HORIZON)

    def forward(self, x):
        mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-3
        h, _ = self.rnn(((x - mean) / std)[..., None])
        return self.out(h[:, -1]) * std + mean


def reduce_gradients(model, world):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world


def main():
    b, k = flags()
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = GRUForecaster().double()
    data = station_windows()
    share = len(data) // world
    loader = DataLoader(Subset(data, range(rank * share, (rank + 1) * share)), batch_size=b)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    criterion = nn.SmoothL1Loss()
    for i, (past, future) in enumerate(loader, 1):
        (criterion(model(past), future) / k).backward()
        if i % k == 0:
            if world > 1:
                reduce_gradients(model, world)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


main()
