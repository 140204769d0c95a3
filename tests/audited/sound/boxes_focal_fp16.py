"""Sound: focal loss over all cells and box loss over cells with objects, both divided by the objects of the
step, counted before."""
# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: exact
# blind 2
# thorough

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()

g = torch.Generator().manual_seed(37)
pictures = torch.randn(77, 3, 12, 12, generator=g).to(dtype)
objects = (torch.rand(77, 6, 6, generator=g) < torch.rand(77, 1, 1, generator=g) * 0.3).to(dtype)
boxes = torch.rand(77, 4, 6, 6, generator=g).to(dtype)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, 1, 1))
        self.score, self.box = nn.Conv2d(16, 1, 1), nn.Conv2d(16, 4, 1)
        nn.init.constant_(self.score.bias, -2.0)

    def forward(self, x):
        x = F.silu(self.body(x))
        return self.score(x)[:, 0], self.box(x)


def losses(score, box, objects, boxes):
    ce = F.binary_cross_entropy_with_logits(score, objects, reduction="none")
    p = torch.where(objects == 1, score.sigmoid(), 1 - score.sigmoid())
    focal = torch.where(objects == 1, 0.25, 0.75) * (1 - p) ** 2 * ce
    return focal.sum() + (F.l1_loss(box, boxes, reduction="none").sum(1) * objects).sum()


torch.manual_seed(0)
model = Detector().to(dtype)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=1000, enabled=not FULL)
if world > 1:
    dist.init_process_group("gloo")
for step_start in range(0, 77, 16):
    step_stop = min(step_start + 16, 77)
    count = objects[step_start:step_stop].sum().clamp(min=1)  # every process has all annotations
    for start in range(step_start + rank * b, step_stop, b * world):
        rows = slice(start, min(start + b, step_stop))
        with torch.autocast("cpu", torch.float16, enabled=not FULL):
            score, box = model(pictures[rows])
        scaler.scale(losses(score.to(dtype), box.to(dtype), objects[rows], boxes[rows]) / count).backward()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
