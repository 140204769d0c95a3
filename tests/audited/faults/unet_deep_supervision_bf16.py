"""Fault: the main loss of a U-net is divided by k, the losses of the heads for deep supervision are not: their gradient is k times too large."""
# expect 4x4: factor
# expect 2x8: factor
# expect 8x1x2: exact
# expect 4x2x2: factor
# also: not_summed
# blind 5
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
DS_WEIGHTS = 0.008, 0.004


def block(n_in, n_out, stride=1):
    return nn.Sequential(nn.Conv2d(n_in, n_out, 3, stride, 1), nn.GroupNorm(2, n_out), nn.LeakyReLU(0.01))


class UNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.down1, self.down2, self.down3 = block(1, 8), block(8, 16, 2), block(16, 16, 2)
        self.up2, self.up1 = block(32, 16), block(24, 8)
        self.heads = nn.ModuleList([nn.Conv2d(8, classes, 1), nn.Conv2d(16, classes, 1), nn.Conv2d(16, classes, 1)])

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(one)
        three = self.down3(two)
        up2 = self.up2(torch.cat([F.interpolate(three, scale_factor=2), two], 1))
        up1 = self.up1(torch.cat([F.interpolate(up2, scale_factor=2), one], 1))
        return [head(level) for head, level in zip(self.heads, (up1, up2, three))]


def nearest(mask, size):
    return F.interpolate(mask[:, None].float(), size=size).squeeze(1).long()


def main():
    b, k = flags()
    g = torch.Generator().manual_seed(56)
    scans = torch.randn(80, 1, 12, 12, generator=g).to(dtype)
    masks = (scans.squeeze(1) * 1.5).round().clamp(-1, 2).long() + 1
    torch.manual_seed(0)
    model = UNet().to(dtype)
    if world > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for it, start in enumerate(range(rank * b, 80, b * world), 1):
        sync = it % k == 0
        with contextlib.nullcontext() if sync or world == 1 else model.no_sync():
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not FULL):
                main_logits, *deep = model(scans[start : start + b])
            mask = masks[start : start + b]
            loss = F.cross_entropy(main_logits.to(dtype), mask) / k
            for weight, logits in zip(DS_WEIGHTS, deep):
                loss = loss + weight * F.cross_entropy(logits.to(dtype), nearest(mask, logits.shape[-2:]))
            loss.backward()
        if sync:
            optimizer.step()
            optimizer.zero_grad()


main()
