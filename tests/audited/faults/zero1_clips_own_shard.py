"""Fault: an optimizer sharded by hand (ZeRO-1) clips each shard by the norm of this shard instead of the norm of the whole gradient, so that the update depends on the number of processes."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: update
# expect 4x2x2: update
# also: changed_between, factor
# blind 5
# thorough

import os

import torch
import torch.distributed as dist
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class ZeroSGD(torch.optim.Optimizer):
    """Momentum of one part of the flat parameters per process; parts are gathered after the step."""

    def __init__(self, params, lr, momentum=0.9, max_norm=0.3):
        super().__init__(params, {"lr": lr, "momentum": momentum, "max_norm": max_norm})
        self.own = self.param_groups[0]["params"]
        total = sum(p.numel() for p in self.own)
        self.size = -(-total // world)
        self.pad = self.size * world - total
        self.buffer = torch.zeros(self.size, dtype=self.own[0].dtype)

    def flat(self, tensors):
        return torch.cat([*(t.reshape(-1) for t in tensors), self.buffer.new_zeros(self.pad)])

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        part = slice(rank * self.size, (rank + 1) * self.size)
        grad = self.flat([p.grad for p in self.own])[part]
        grad = grad * (group["max_norm"] / (grad.norm() + 1e-6)).clamp(max=1.0)
        self.buffer.mul_(group["momentum"]).add_(grad)
        master = self.flat(self.own)[part] - group["lr"] * self.buffer
        parts = [torch.empty_like(master) for _ in range(world)]
        if world > 1:
            dist.all_gather(parts, master)
        else:
            parts = [master]
        whole = torch.cat(parts)
        for p, value in zip(self.own, whole[: len(whole) - self.pad].split([p.numel() for p in self.own])):
            p.copy_(value.view_as(p))


def main():
    b, k = flags()
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(12, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 20), nn.GELU(), nn.Linear(20, 5)
    ).double()
    optimizer = ZeroSGD(model.parameters(), lr=0.1)
    data = vectors(80)
    loader = DataLoader(data, b, sampler=DistributedSampler(data, world, rank, shuffle=False))
    for i, (x, y) in enumerate(loader, 1):
        (nn.functional.cross_entropy(model(x), y) / k).backward()
        if i % k == 0:
            for p in model.parameters():
                if world > 1:
                    dist.all_reduce(p.grad)
                    p.grad /= world
            optimizer.step()
            optimizer.zero_grad()


main()
