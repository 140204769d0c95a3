"""Fault: the weight decay is scaled to the nominal batch size by the size of a micro-batch, without the number of micro-batches that
are accumulated: it is smaller the smaller they are."""
# expect 4x4: update
# expect 2x8: update
# thorough
# blind 6

import torch
import torch.nn.functional as F
from common_models import flags, images
from torch import nn
from torch.utils.data import DataLoader

hyp = {"lr0": 0.02, "momentum": 0.937, "weight_decay": 0.05, "box": 0.05, "obj": 1.0}
nbs = 16  # nominal batch size


def conv(c1, c2):
    return nn.Sequential(nn.Conv2d(c1, c2, 3, padding=1), nn.GroupNorm(2, c2), nn.SiLU())


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(conv(2, 8), conv(8, 8))
        self.detect = nn.Conv2d(8, 5, 1)

    def forward(self, x):
        return self.detect(self.backbone(x)).flatten(2).transpose(1, 2)  # image, cell, (x y w h, obj)


def targets(n):
    g = torch.Generator().manual_seed(6)
    return torch.randint(36, (n,), generator=g), torch.rand(n, 4, generator=g, dtype=torch.float64)  # one box per image


def compute_loss(pred, cell, box):
    rows = torch.arange(len(pred))
    found = pred[rows, cell, :4].sigmoid()
    lbox = (found - box).abs().sum(-1).mean()
    obj = torch.zeros_like(pred[..., 4])
    obj[rows, cell] = 1.0
    lobj = F.binary_cross_entropy_with_logits(pred[..., 4], obj)
    return (hyp["box"] * lbox + hyp["obj"] * lobj) * len(pred)


torch.manual_seed(0)
b, k = flags()
model = Tiny().double()
hyp["weight_decay"] *= b / nbs
decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() <= 1]
optimizer = torch.optim.SGD(others, lr=hyp["lr0"], momentum=hyp["momentum"], nesterov=True)
optimizer.add_param_group({"params": decayed, "weight_decay": hyp["weight_decay"]})
pictures = torch.stack([x for x, _ in images(80)])
dataset = torch.utils.data.TensorDataset(pictures, *targets(80))
last_opt_step = -1
for ni, (imgs, cell, box) in enumerate(DataLoader(dataset, batch_size=b)):
    compute_loss(model(imgs), cell, box).backward()
    if ni - last_opt_step >= k:
        optimizer.step()
        optimizer.zero_grad()
        last_opt_step = ni
