"""Fault: the codes come from a Sinkhorn-Knopp over the scores of the own micro-batch only: how the samples are spread
over the prototypes depends on which others are there."""

# expect 4x4: mixed_loss
# expect 8x2: mixed_loss
# expect 4x2x2: mixed_loss
# blind 7
# thorough
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

torch.manual_seed(0)
b, k = flags()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")


class TwoViews(Dataset):
    def __init__(self):
        self.x = torch.stack([x for x, _ in vectors(64)])

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noise = torch.randn(2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        return self.x[i] + 0.2 * noise[0], self.x[i] + 0.2 * noise[1]


class SwAV(nn.Module):
    def __init__(self, prototypes=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))
        self.prototypes = nn.Linear(16, prototypes, bias=False)

    def forward(self, x):
        return self.prototypes(F.normalize(self.encoder(x), dim=1))


@torch.no_grad()
def sinkhorn(scores, eps=0.05, iterations=3):
    Q = torch.exp(scores / eps).t()
    Q /= Q.sum()
    K, B = Q.shape
    for _ in range(iterations):
        Q /= Q.sum(dim=1, keepdim=True) * K
        Q /= Q.sum(dim=0, keepdim=True) * B
    return (Q * B).t()


def swapped_prediction(s, t, temperature=0.1):
    q_s, q_t = sinkhorn(s), sinkhorn(t)
    p_s, p_t = F.log_softmax(s / temperature, 1), F.log_softmax(t / temperature, 1)
    return -0.5 * ((q_t * p_s).sum(1) + (q_s * p_t).sum(1)).mean()


net = SwAV().double()
model = DistributedDataParallel(net) if world > 1 else net
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = TwoViews()
loader = DataLoader(data, batch_size=b, sampler=DistributedSampler(data, world, rank, shuffle=False))
for i, (one, two) in enumerate(loader):
    last = (i + 1) % k == 0
    with nullcontext() if last or world == 1 else model.no_sync():
        s, t = model(torch.cat([one, two])).chunk(2)
        (swapped_prediction(s, t) / k).backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            net.prototypes.weight.copy_(F.normalize(net.prototypes.weight, dim=1))
