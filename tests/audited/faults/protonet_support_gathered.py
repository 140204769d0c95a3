"""Fault: prototypes are means over the support images of all processes, but those of other processes come
without a gradient (dist.all_gather)."""
# expect 8x2: mixed_loss
# expect 8x1x2: gathered_without_gradient
# also: not_a_sum
# blind 3
# thorough

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WAYS = 4
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def episodes(n=5):
    """Each has 16 images, 4 ways in turn: four of support, four of queries, and so on."""
    g = torch.Generator().manual_seed(19)
    for _ in range(n):
        centres = torch.randn(WAYS, 1, 6, 6, generator=g, dtype=torch.float64)
        way = torch.arange(16) % WAYS
        pictures = centres[way] + 0.8 * torch.randn(16, 1, 6, 6, generator=g, dtype=torch.float64)
        yield pictures, way, torch.arange(16) // WAYS % 2 == 0


def all_gather(tensor):
    if world == 1:
        return tensor
    parts = [torch.zeros_like(tensor) for _ in range(world)]
    dist.all_gather(parts, tensor.contiguous())
    parts[rank] = tensor  # keeps the gradient of one's own
    return torch.cat(parts)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten())
        self.last = nn.Linear(32, 10)

    def forward(self, x):
        return self.last(self.body(x))


def main():
    b, k = flags()
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    encoder = Encoder().double()
    model = DistributedDataParallel(encoder) if world > 1 else encoder
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for pictures, way, is_support in episodes():
        for start in range(rank * b, 16, b * world):
            own = slice(start, start + b)
            embedded, ways, support = model(pictures[own]), way[own], is_support[own]
            supports, support_ways = all_gather(embedded[support]), all_gather(ways[support])
            prototypes = torch.stack([supports[support_ways == c].mean(0) for c in range(WAYS)])
            distance = torch.cdist(embedded[~support], prototypes) ** 2
            (F.cross_entropy(-distance, ways[~support]) / k).backward()
        optimizer.step()
        optimizer.zero_grad()


main()
