"""Fault: set-prediction losses are divided by the number of boxes of this micro-batch (of all processes, as
DETR does), then by k: images in micro-batches with few boxes weigh more."""
# expect 4x4: mean_of_means
# expect 8x1x2: exact
# expect 4x2x2: mean_of_means
# blind 1
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from scipy.optimize import linear_sum_assignment
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

world = int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
b, k = flags()
QUERIES, CLASSES = 5, 3


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(36, 24), nn.Tanh()
        )
        self.classes = nn.Linear(24, QUERIES * (CLASSES + 1))
        self.boxes = nn.Linear(24, QUERIES * 4)

    def forward(self, x):
        h = self.backbone(x)
        return self.classes(h).view(-1, QUERIES, CLASSES + 1), self.boxes(h).view(-1, QUERIES, 4).sigmoid()


def scenes(n=80):
    g = torch.Generator().manual_seed(2)
    for _ in range(n):
        boxes = int(torch.randint(1, QUERIES + 1, (), generator=g))
        labels = torch.randint(CLASSES, (boxes,), generator=g)
        yield torch.randn(1, 8, 8, generator=g).double(), labels, torch.rand(boxes, 4, generator=g).double()


def criterion(logits, boxes, labels, targets):
    total = 0.0
    for scores, predicted, label, box in zip(logits, boxes, labels, targets):
        cost = torch.cdist(predicted, box, p=1) - scores.softmax(-1)[:, label]
        rows, columns = linear_sum_assignment(cost.detach().numpy())
        wanted = torch.full((QUERIES,), CLASSES)
        wanted[rows] = label[columns]
        total = (
            total + F.cross_entropy(scores, wanted, reduction="sum") + 5 * (predicted[rows] - box[columns]).abs().sum()
        )
    num_boxes = torch.tensor(float(sum(map(len, labels))), dtype=torch.float64)
    if world > 1:
        dist.all_reduce(num_boxes)
    return total / (num_boxes / world).clamp(min=1)


torch.manual_seed(0)
model = Detector().double()
model = DistributedDataParallel(model) if world > 1 else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = list(scenes())
sampler = DistributedSampler(data, shuffle=False) if world > 1 else None
loader = DataLoader(data, batch_size=b, sampler=sampler, collate_fn=lambda s: tuple(zip(*s)))
for i, (images, labels, targets) in enumerate(loader, 1):
    with model.no_sync() if world > 1 and i % k else contextlib.nullcontext():
        (criterion(*model(torch.stack(images)), labels, targets) / k).backward()
    if i % k == 0:
        optimizer.step()
        optimizer.zero_grad()
