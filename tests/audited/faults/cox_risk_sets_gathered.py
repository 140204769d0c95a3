"""Fault: the risk sets of a Cox regression span all processes, but the risks of the other processes are gathered without a gradient: a patient's part in the risk sets of other processes' events is lost."""
# expect 8x1x2: gathered_without_gradient
# expect 4x4: mixed_loss
# blind 5
# thorough

import os

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class DeepSurv(nn.Module):
    def __init__(self, n=9):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(n, 24), nn.SELU(), nn.Linear(24, 24), nn.SELU(), nn.Linear(24, 1, bias=False)
        )

    def forward(self, x):
        return self.layers(x).squeeze(1)


def gather(tensor):
    """The rows of all processes, in the order of ranks; one's own keep their graph."""
    if world == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_gather(parts, tensor.detach())
    parts[rank] = tensor
    return torch.cat(parts)


def partial_likelihood(risk, time, event):
    everyone, times, events = gather(risk), gather(time), gather(event)
    at_risk = times[None] >= time[:, None]
    log_sum = torch.where(at_risk, everyone[None], -torch.inf).logsumexp(1)
    own = ((log_sum - risk) * event).sum()
    return own * world / events.sum()  # DDP takes the mean over processes


def load():
    g = torch.Generator().manual_seed(60)
    x = torch.randn(80, 9, generator=g, dtype=torch.float64)
    time = torch.empty(80, dtype=torch.float64).exponential_(generator=g) * torch.exp(-x[:, 0])
    return x, time, (torch.rand(80, generator=g) < 0.8).double()


def main():
    b, k = flags()
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DeepSurv().double()
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    x, time, event = load()
    for i, start in enumerate(range(rank * b, 80, b * world), 1):
        rows = slice(start, start + b)
        loss = partial_likelihood(model(x[rows]), time[rows], event[rows])
        (loss / k).backward()
        if i % k == 0:
            optimizer.step()
            optimizer.zero_grad()


main()
