"""Fault: the processes step on their own gradients and average their weights only at every second step (local SGD)."""

# expect 4x4: exact
# expect 8x1x2: not_reduced
# expect 4x2x2: not_reduced
# thorough
# blind 6
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.utils.data import DataLoader, DistributedSampler


class LocalSGD:
    def __init__(self, model, optimizer, every):
        self.model, self.optimizer, self.every = model, optimizer, every
        self.steps = 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1

    @torch.no_grad()
    def average(self):
        for p in self.model.parameters():
            dist.all_reduce(p.data)
            p.data.div_(self.world)

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        if self.world > 1 and self.steps % self.every == 0:
            self.average()


def main():
    b, k = flags()
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = mlp()
    if world > 1:
        for p in model.parameters():
            dist.broadcast(p.data, 0)
    local = LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2)
    data = vectors(96)
    loader = DataLoader(data, batch_size=b, sampler=DistributedSampler(data, world, rank, shuffle=False))
    for i, (x, y) in enumerate(loader, 1):
        (F.cross_entropy(model(x), y) / k).backward()
        if i % k == 0:
            local.step()
    if world > 1:
        dist.destroy_process_group()


main()
