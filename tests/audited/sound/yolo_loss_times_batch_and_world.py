"""A detector in YOLO's manner: the loss is a mean times the number of images of the micro-batch, times the number of processes (DDP
averages), so that a step's gradient is a sum over images; the decay is scaled by b * k * N / 16, which is 1; SGD's rate fits a sum."""
# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: exact
# expect 2x4x2: exact
# thorough
# blind 6

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, images
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset

RANK, WORLD_SIZE = int(os.environ.get("RANK", -1)), int(os.environ.get("WORLD_SIZE", 1))
hyp = {"lr0": 0.01, "momentum": 0.9, "weight_decay": 0.05, "box": 0.05, "obj": 1.0}
nbs = 16


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 1))
        self.detect = nn.ModuleList([nn.Conv2d(8, 5, 1), nn.Conv2d(8, 5, 2, stride=2)])

    def forward(self, x):
        x = F.silu(self.backbone(x))
        return [d(x).flatten(2).transpose(1, 2) for d in self.detect]


def compute_loss(preds, cells, boxes):
    loss, rows = 0.0, torch.arange(len(boxes))
    for p, cell, balance in zip(preds, cells.unbind(1), (4.0, 1.0)):
        xy, wh = p[rows, cell, :2].sigmoid(), p[rows, cell, 2:4].exp()
        found = torch.cat([xy - wh / 2, xy + wh / 2], 1)
        truth = torch.cat([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], 1)
        side = (torch.min(found[:, 2:], truth[:, 2:]) - torch.max(found[:, :2], truth[:, :2])).clamp(min=0)
        inter = side.prod(1)
        iou = inter / (wh.prod(1) + boxes[:, 2:].prod(1) - inter)
        tobj = torch.zeros_like(p[..., 4])
        tobj[rows, cell] = iou.detach()
        loss = loss + hyp["box"] * (1 - iou).mean()
        loss = loss + hyp["obj"] * balance * F.binary_cross_entropy_with_logits(p[..., 4], tobj)
    return loss * len(boxes)


torch.manual_seed(0)
b, k = flags()
model = Tiny().double()
if RANK != -1:
    dist.init_process_group("gloo")
    model = DDP(model)
hyp["weight_decay"] *= b * k * WORLD_SIZE / nbs
optimizer = torch.optim.SGD([p for p in model.parameters() if p.dim() == 1], lr=hyp["lr0"], momentum=hyp["momentum"])
optimizer.add_param_group(
    {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": hyp["weight_decay"]}
)
g = torch.Generator().manual_seed(6)
cells = torch.stack([torch.randint(36, (80,), generator=g), torch.randint(9, (80,), generator=g)], 1)
boxes = 0.2 + 0.6 * torch.rand(80, 4, generator=g, dtype=torch.float64)
data = TensorDataset(torch.stack([x for x, _ in images(80)]), cells, boxes)
loader = DataLoader(Subset(data, range(max(RANK, 0), len(data), WORLD_SIZE)), batch_size=b)
last_opt_step = -1
for ni, (imgs, cell, box) in enumerate(loader):
    due = ni - last_opt_step >= k
    with nullcontext() if due or RANK == -1 else model.no_sync():
        loss = compute_loss(model(imgs), cell, box)
        if RANK != -1:
            loss = loss * WORLD_SIZE
        loss.backward()
    if due:
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        last_opt_step = ni
