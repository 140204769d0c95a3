"""Fault: the normalized weight decay of the AdamW paper, norm * sqrt(batch / (samples * epochs)), is computed from the batch of a device instead of that of a step."""
# expect 4x4: update
# expect 2x8: update
# expect 8x1x2: update
# expect 4x2x2: update
# blind 4
# thorough

import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, images
from torch import nn

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EPOCHS, NORMALIZED_DECAY = 2, 2.0


class ConvNeXtBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.spatial = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.GroupNorm(1, width)
        self.widen, self.narrow = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(3 * width, width, 1)
        self.scale = nn.Parameter(0.1 * torch.ones(width, 1, 1))

    def forward(self, x):
        return x + self.scale * self.narrow(F.gelu(self.widen(self.norm(self.spatial(x)))))


def param_groups(model, decay):
    decayed = [p for p in model.parameters() if p.ndim >= 2 and p.numel() > p.shape[0]]
    rest = [p for p in model.parameters() if not any(p is q for q in decayed)]
    return [{"params": decayed, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]


def average_gradients(model):
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(world)


torch.manual_seed(0)
b, k = flags()
if world > 1:
    dist.init_process_group("gloo")
dataset = images(64)
model = nn.Sequential(
    nn.Conv2d(2, 8, 2, stride=2), ConvNeXtBlock(8), ConvNeXtBlock(8), nn.Flatten(), nn.Linear(72, 5)
).double()
decay = NORMALIZED_DECAY * math.sqrt(b / (len(dataset) * EPOCHS))
optimizer = torch.optim.AdamW(param_groups(model, decay), lr=2e-3)
micro = 0
for epoch in range(EPOCHS):
    shuffled = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(epoch))
    for index in shuffled.split(b)[rank::world]:
        x, y = (torch.stack(column) for column in zip(*[dataset[i] for i in index]))
        (F.cross_entropy(model(x), y, label_smoothing=0.1) / k).backward()
        micro += 1
        if micro % k == 0:
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
