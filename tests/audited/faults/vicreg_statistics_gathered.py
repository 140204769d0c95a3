"""Fault: variance and covariance are those of all processes' embeddings, which dist.all_gather brings without a gradient, except for the own ones."""
# expect 8x1x2: gathered_without_gradient
# expect 8x2: mixed_loss
# also: factor, not_a_sum, not_summed
# blind 4
# thorough

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
g = torch.Generator().manual_seed(21)
spectra = torch.randn(80, 18, generator=g, dtype=torch.float64)
views = torch.stack([spectra + 0.2 * torch.randn(80, 18, generator=g, dtype=torch.float64) for _ in range(2)])


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(18, 24), nn.ReLU(), nn.Linear(24, 12))
        self.projector = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16))

    def forward(self, x):
        return self.projector(self.encoder(x))


def of_all_processes(z):
    if world == 1:
        return z
    parts = [torch.zeros_like(z) for _ in range(world)]
    dist.all_gather(parts, z)
    parts[rank] = z
    return torch.cat(parts)


def vicreg(a, c, invariance=25.0, variance=25.0, covariance=1.0):
    loss = invariance * F.mse_loss(a, c)
    for z in (of_all_processes(a), of_all_processes(c)):
        z = z - z.mean(0)
        std = (z.var(0) + 1e-4).sqrt()
        cov = z.T @ z / (len(z) - 1)
        off_diagonal = cov - torch.diag(cov.diagonal())
        loss = loss + variance * F.relu(1 - std).mean() / 2 + covariance * off_diagonal.pow(2).sum() / z.shape[1]
    return loss


b, k = flags()
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
net = Embedder().double()
model = DDP(net) if world > 1 else net
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-6)
for i, start in enumerate(range(rank * b, 80, b * world), 1):
    both = model(views[:, start : start + b].flatten(0, 1))
    loss = vicreg(*both.chunk(2)) / k
    loss.backward()
    if i % k == 0:
        optimizer.step()
        optimizer.zero_grad()
