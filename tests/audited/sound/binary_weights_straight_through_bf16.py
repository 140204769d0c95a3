"""Sound: binary weights and activations with a straight-through autograd.Function; hidden weights are clamped after each step only."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 4
# thorough

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x >= 0, torch.ones_like(x), -torch.ones_like(x))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class BinaryConv(nn.Conv2d):
    def forward(self, x):
        scale = self.weight.detach().abs().mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, Sign.apply(self.weight) * scale, self.bias, self.stride, self.padding)


class BinaryNet(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.binary = BinaryConv(width, width, 3, padding=1)
        self.norm, self.last = nn.GroupNorm(3, width), nn.Linear(width * 9, 4)

    def forward(self, x):
        x = F.hardtanh(self.first(x))
        x = x + self.norm(self.binary(x))
        return self.last(F.avg_pool2d(x, 2).flatten(1))

    @torch.no_grad()
    def clamp_weights(self):
        self.binary.weight.clamp_(-1, 1)


b, k = flags()
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
net = BinaryNet().to(dtype)
with torch.no_grad():
    net.binary.weight.mul_(3)
model = DDP(net) if world > 1 else net
optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
g = torch.Generator().manual_seed(16)
data = TensorDataset(torch.randn(80, 1, 6, 6, generator=g).to(dtype), torch.randint(4, (80,), generator=g))
for i, (x, y) in enumerate(DataLoader(data, b, sampler=DistributedSampler(data, world, rank, shuffle=False)), 1):
    with nullcontext() if i % k == 0 or world == 1 else model.no_sync():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not FULL):
            scores = model(x)
        (F.multi_margin_loss(scores.to(dtype), y) / k).backward()
    if i % k == 0:
        optimizer.step()
        net.clamp_weights()
        optimizer.zero_grad()
