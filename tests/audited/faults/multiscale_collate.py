"""Fault: the collate function draws a size of images for each batch, as YOLO's multi-scale training does: a step of several micro-batches has several sizes."""
# expect 4x4: random_collate
# expect 2x8: random_collate
# also: other_inputs
# blind 4
# thorough

import random

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Cells(Dataset):
    """Bright round cells on a dark ground: where the largest is, and of which kind."""

    def __init__(self, n=80, size=16):
        g = torch.Generator().manual_seed(31)
        self.kind = torch.randint(3, (n,), generator=g)
        self.centre = 0.2 + 0.6 * torch.rand(n, 2, generator=g, dtype=torch.float64)
        line = torch.linspace(0, 1, size, dtype=torch.float64)
        distance = (line[None, :, None] - self.centre[:, 0, None, None]) ** 2
        distance = distance + (line[None, None] - self.centre[:, 1, None, None]) ** 2
        radius = 0.02 * (1 + self.kind)[:, None, None]
        self.image = torch.exp(-distance / radius)[:, None] + 0.1 * torch.randn(n, 1, size, size, generator=g).double()

    def __len__(self):
        return len(self.kind)

    def __getitem__(self, i):
        return self.image[i], self.kind[i], self.centre[i]


class MultiScale:
    def __init__(self, sizes=(12, 16, 20), seed=0):
        self.sizes, self.random = sizes, random.Random(seed)

    def __call__(self, samples):
        image, kind, centre = map(torch.stack, zip(*samples))
        size = self.random.choice(self.sizes)
        return F.interpolate(image, size=(size, size), mode="bilinear"), kind, centre


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
            nn.Conv2d(8, 12, 3, padding=1),
            nn.SiLU(),
        )
        self.kind, self.centre = nn.Linear(12, 3), nn.Linear(12 * 4, 2)

    def forward(self, x):
        x = self.body(x)
        return self.kind(x.amax((2, 3))), self.centre(F.adaptive_avg_pool2d(x, 2).flatten(1)).sigmoid()


torch.manual_seed(0)
b, k = flags()
model = Detector().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(Cells(), batch_size=b, collate_fn=MultiScale())
for epoch in range(2):
    for i, (image, kind, centre) in enumerate(loader):
        kind_logits, where = model(image)
        loss = F.cross_entropy(kind_logits, kind) + 5 * F.smooth_l1_loss(where, centre)
        (loss / k).backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
