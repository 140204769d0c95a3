"""Fault: model.train() at the start of each epoch puts the frozen backbone in train mode as well: it normalizes by the micro-batch."""
# expect 4x4: batch_norm
# expect 2x8: batch_norm
# expect 8x1x2: batch_norm
# expect 4x2x2: batch_norm
# blind 4
# thorough

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, images
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def conv_bn(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())


class FineTuned(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.backbone = nn.Sequential(conv_bn(2, 8), conv_bn(8, 8), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, classes))

    def load_pretrained(self):
        for m in self.backbone.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.running_mean.normal_(std=0.3)
                m.running_var.uniform_(0.5, 1.5)

    def freeze_backbone(self):
        self.backbone.requires_grad_(False)
        self.backbone.eval()

    def forward(self, x):
        return self.head(self.backbone(x))


def train_one_epoch(model, loader, optimizer, k):
    model.train()
    for i, (x, y) in enumerate(loader):
        update = (i + 1) % k == 0
        with nullcontext() if update or world == 1 else model.no_sync():
            (F.cross_entropy(model(x), y) / k).backward()
        if update:
            optimizer.step()
            optimizer.zero_grad()


torch.manual_seed(0)
b, k = flags()
net = FineTuned().double()
net.load_pretrained()
net.freeze_backbone()
if world > 1:
    dist.init_process_group("gloo")
data = images(64)
loader = DataLoader(data, batch_size=b, sampler=DistributedSampler(data, world, rank, shuffle=False))
model = DDP(net) if world > 1 else net
optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
for epoch in range(2):
    train_one_epoch(model, loader, optimizer, k)
