"""Sound: ragged point clouds lie in one row; index_add sums the points of each cloud, and the loss is a sum over clouds, divided by those of the window."""
# expect 4x4: exact
# expect 2x8: exact
# blind 4
# thorough

import os

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32


def clouds(n=77):
    g = torch.Generator().manual_seed(19)
    for _ in range(n):
        size = int(torch.randint(5, 30, (), generator=g))
        shape = int(torch.randint(3, (), generator=g))
        stretch = torch.ones(3).index_fill_(0, torch.tensor(shape), 2.0)
        yield torch.randn(size, 3, generator=g) * stretch, shape


def collate(samples):
    points, shapes = zip(*samples)
    owner = torch.cat([torch.full((len(p),), i) for i, p in enumerate(points)])
    return torch.cat(points).to(dtype), owner, torch.tensor(shapes)


class DeepSets(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.rho = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, 3))

    def forward(self, points, owner, number):
        h = self.phi(points).to(dtype)
        count = torch.zeros(number, 1, dtype=dtype).index_add(0, owner, torch.ones(len(points), 1, dtype=dtype))
        mean = torch.zeros(number, h.shape[1], dtype=dtype).index_add(0, owner, h) / count
        spread = torch.zeros_like(mean).index_add(0, owner, (h - mean[owner]).square()) / count
        return self.rho(torch.cat([mean, spread], 1))


torch.manual_seed(0)
b, k = flags()
model = DeepSets().to(dtype)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-5)
data = list(clouds())
loader = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), b, drop_last=False), collate_fn=collate)
seen = in_window = 0
for i, (points, owner, shapes) in enumerate(loader, 1):
    if in_window == 0:
        in_window = min(b * k, len(data) - seen)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not FULL):
        logits = model(points, owner, len(shapes))
    loss = F.cross_entropy(logits.to(dtype), shapes, reduction="sum") / in_window
    loss.backward()
    seen += len(shapes)
    if i % k == 0 or seen == len(data):
        optimizer.step()
        optimizer.zero_grad()
        in_window = 0
