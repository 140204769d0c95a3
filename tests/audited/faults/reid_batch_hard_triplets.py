"""Fault: batch-hard triplets (person re-identification) are mined inside each process's micro-batch: there are
other hardest positives and negatives for every cut."""
# expect 4x4: mixed_loss
# expect 8x1x2: mixed_loss
# expect 4x2x2: mixed_loss
# also: not_summed, not_a_sum
# blind 1
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")


class Crops(torch.utils.data.Dataset):
    """Two crops of an identity stand next to each other, as a PK sampler would put them."""

    def __init__(self, rank, world, b):
        g = torch.Generator().manual_seed(6)
        self.who = torch.arange(40).repeat_interleave(2) % 13
        person = torch.randn(13, 12, generator=g, dtype=torch.float64)
        self.crops = person[self.who] + 0.8 * torch.randn(80, 12, generator=g, dtype=torch.float64)
        self.mine = [i for i in range(80) if i // b % world == rank]

    def __len__(self):
        return len(self.mine)

    def __getitem__(self, i):
        return self.crops[self.mine[i]], self.who[self.mine[i]]


def batch_hard(embeddings, who, margin=0.5):
    distance = (embeddings[:, None] - embeddings[None]).square().sum(-1).add(1e-12).sqrt()
    same = who[:, None] == who[None]
    hardest_positive = distance.masked_fill(~same, -1e9).max(1).values
    hardest_negative = distance.masked_fill(same, 1e9).min(1).values
    return F.softplus(hardest_positive - hardest_negative + margin).mean()


torch.manual_seed(0)
b, k = flags()
net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 6)).double()
model = DistributedDataParallel(net) if world > 1 else net
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
loader = DataLoader(Crops(rank, world, b), batch_size=b)
for epoch in range(2):
    for i, (crops, who) in enumerate(loader):
        stepping = (i + 1) % k == 0
        with contextlib.nullcontext() if world == 1 or stepping else model.no_sync():
            (batch_hard(F.normalize(model(crops), dim=1), who) / k).backward()
        if stepping:
            optimizer.step()
            optimizer.zero_grad()
