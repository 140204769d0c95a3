"""Fault: the maximum mean discrepancy of two domains is estimated within each micro-batch (and process): it is
no sum over samples."""
# expect 4x4: mixed_loss
# expect 2x8: mixed_loss
# expect 8x1x2: mixed_loss
# blind 3
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
LAMBDA = 0.02
g = torch.Generator().manual_seed(17)
photos = torch.randn(80, 16, generator=g).to(dtype)
kinds = torch.randint(5, (80,), generator=g)
sketches = (torch.randn(80, 16, generator=g) * 0.7 + 0.8).to(dtype)  # no labels


def rbf(a, b):
    distance = (a[:, None] - b[None]).pow(2).sum(-1)
    return sum(torch.exp(-distance / (2 * s * s)) for s in (1.0, 2.0, 4.0))


def mmd(source, target):
    return rbf(source, source).mean() + rbf(target, target).mean() - 2 * rbf(source, target).mean()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 12))
        self.classifier = nn.Linear(12, 5)

    def forward(self, source, target):
        a, b = self.features(source), self.features(target)
        return self.classifier(a), a, b


def main():
    b, k = flags()
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net().to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    for step, start in enumerate(range(rank * b, 80, b * world), 1):
        rows = slice(start, start + b)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not FULL):
            logits, source, target = net(photos[rows], sketches[rows])
        loss = F.cross_entropy(logits.to(dtype), kinds[rows]) + LAMBDA * mmd(source.to(dtype), target.to(dtype))
        (loss / k).backward()
        if step % k == 0:
            if world > 1:
                flat = torch.cat([p.grad.flatten() for p in net.parameters()])
                dist.all_reduce(flat)
                for p in net.parameters():
                    p.grad.copy_((flat[: p.numel()] / world).view_as(p))
                    flat = flat[p.numel() :]
            optimizer.step()
            optimizer.zero_grad()


main()
