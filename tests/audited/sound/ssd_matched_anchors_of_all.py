"""Sound: a detector whose loss is divided by the number of matched anchors of the whole step: the window is fetched
first, the matches are counted and summed over the processes, and DDP's mean is undone by a factor of world."""

# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: exact
# expect 8x1x2: exact
# blind 7
# thorough
import os
from contextlib import nullcontext
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

torch.manual_seed(0)
b, k = flags()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
CLASSES, GRID = 3, 4
centers = (
    torch.stack(torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="xy"), -1).view(-1, 2) + 0.5
) / GRID


def scenes(n=72):
    g = torch.Generator().manual_seed(1)
    out = []
    for _ in range(n):
        m = int(torch.randint(0, 5, (), generator=g))  # some have no object
        boxes = torch.rand(m, 2, generator=g, dtype=torch.float64)
        out.append(
            (torch.randn(2, 8, 8, generator=g, dtype=torch.float64), boxes, torch.randint(CLASSES, (m,), generator=g))
        )
    return out


def match(boxes, labels):
    """Anchor targets of one scene: class (0 is background) and offset."""
    cls = torch.zeros(len(centers), dtype=torch.long)
    offset = torch.zeros(len(centers), 2, dtype=torch.float64)
    for box, label in zip(boxes, labels):
        near = (centers - box).abs().max(1).values < 1 / GRID
        cls[near] = label + 1
        offset[near] = (box - centers[near]) * GRID
    return cls, offset


def collate(samples):
    cls, offset = zip(*(match(boxes, labels) for _, boxes, labels in samples))
    return torch.stack([image for image, _, _ in samples]), torch.stack(cls), torch.stack(offset)


class SSD(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 12, 3, stride=2, padding=1), nn.ReLU())
        self.head = nn.Conv2d(12, CLASSES + 1 + 2, 3, padding=1)

    def forward(self, x):
        out = self.head(self.body(x)).flatten(2).mT
        return out[..., : CLASSES + 1], out[..., CLASSES + 1 :]


model = SSD().double()
model = DistributedDataParallel(model) if world > 1 else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
data = scenes()
loader = iter(
    DataLoader(data, batch_size=b, sampler=DistributedSampler(data, world, rank, shuffle=False), collate_fn=collate)
)
while window := list(islice(loader, k)):
    matched = torch.stack([(cls > 0).sum() for _, cls, _ in window]).sum()
    if world > 1:
        dist.all_reduce(matched)
    for j, (image, cls, offset) in enumerate(window, 1):
        with nullcontext() if world == 1 or j == len(window) else model.no_sync():
            logits, delta = model(image)
            positive = cls > 0
            loss = F.cross_entropy(logits.flatten(0, 1), cls.flatten(), reduction="sum")
            loss = loss + F.smooth_l1_loss(delta[positive], offset[positive], reduction="sum")
            (loss * world / matched.clamp(min=1)).backward()
    optimizer.step()
    optimizer.zero_grad()
