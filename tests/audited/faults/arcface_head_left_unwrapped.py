"""Fault: the backbone is wrapped in DDP but the margin head, which has the class centres, is not: every process trains
its own head on its own gradient."""

# expect 4x4: exact
# expect 4x2x2: not_reduced
# expect 8x1x2: not_reduced
# blind 7
# thorough
import math
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, images
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

torch.manual_seed(0)
b, k = flags()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")


class Backbone(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.conv1 = nn.Conv2d(2, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.fc = nn.Linear(8 * 9, dim)

    def forward(self, x):
        return self.fc(F.relu(self.conv2(F.relu(self.conv1(x)))).flatten(1))


class ArcMargin(nn.Module):
    def __init__(self, dim=12, classes=5, s=16.0, m=0.2):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, dim))
        nn.init.xavier_uniform_(self.weight)
        self.s, self.cos_m, self.sin_m = s, math.cos(m), math.sin(m)

    def forward(self, embedding, label):
        cosine = F.linear(F.normalize(embedding), F.normalize(self.weight))
        sine = (1 - cosine**2).clamp(min=1e-9).sqrt()
        phi = cosine * self.cos_m - sine * self.sin_m
        one_hot = F.one_hot(label, cosine.size(1)).bool()
        return self.s * torch.where(one_hot, phi, cosine)


backbone, head = Backbone().double(), ArcMargin().double()
if world > 1:
    backbone = DistributedDataParallel(backbone)
optimizer = torch.optim.SGD(
    [{"params": backbone.parameters()}, {"params": head.parameters(), "lr": 0.1}], lr=0.02, momentum=0.9
)
data = images(80)
sampler = DistributedSampler(data, world, rank, shuffle=False)
for i, (face, identity) in enumerate(DataLoader(data, batch_size=b, sampler=sampler)):
    sync = (i + 1) % k == 0
    with nullcontext() if sync or world == 1 else backbone.no_sync():
        loss = F.cross_entropy(head(backbone(face), identity), identity)
        (loss / k).backward()
    if sync:
        optimizer.step()
        optimizer.zero_grad()
