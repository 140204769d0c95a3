"""Fault: the parameters without weight decay are looked up by name after the model is wrapped: under DDP the names
begin with "module.", nothing is found, and cls token and position embedding decay as well."""

# expect 4x4: exact
# expect 4x2x2: update
# expect 8x1x2: update
# blind 7
# thorough
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


class ViT(nn.Module):
    def __init__(self, dim=16, classes=5):
        super().__init__()
        self.patches = nn.Conv2d(2, dim, 2, stride=2)
        self.cls_token = nn.Parameter(0.5 * torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(0.5 * torch.randn(1, 10, dim))
        layer = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.blocks(x)[:, 0])


def param_groups(model, weight_decay, skip_list=("cls_token", "pos_embed")):
    groups = []
    for name, p in model.named_parameters():
        no_decay = p.ndim == 1 or name in skip_list
        groups.append({"params": [p], "weight_decay": 0.0 if no_decay else weight_decay})
    return groups


model = ViT().double()
if world > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(param_groups(model, 0.3), lr=5e-3)
data = images(80)
sampler = DistributedSampler(data, world, rank, shuffle=False)
for i, (x, y) in enumerate(DataLoader(data, batch_size=b, sampler=sampler)):
    sync = (i + 1) % k == 0
    with nullcontext() if sync or world == 1 else model.no_sync():
        (F.cross_entropy(model(x), y) / k).backward()
    if sync:
        optimizer.step()
        optimizer.zero_grad()
