"""Fault: the process group takes its rank from torchrun, the streaming dataset from SLURM_PROCID, which torchrun does not set:
every process reads the shard of rank 0."""

# expect 4x4: exact
# expect 8x1x2: not_sharded
# expect 4x2x2: not_sharded
# blind 7
# thorough
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, images
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


def env_int(*names, default):
    for name in names:
        if name in os.environ:
            return int(os.environ[name])
    return default


class ShardedStream(IterableDataset):
    """Every num_shards-th sample of an endless stream, in a seeded order."""

    def __init__(self, samples, rank, num_shards, seed=0):
        self.samples, self.rank, self.num_shards, self.seed = samples, rank, num_shards, seed

    def __iter__(self):
        g, count = torch.Generator().manual_seed(self.seed), 0
        while True:
            for index in torch.randperm(len(self.samples), generator=g).tolist():
                if count % self.num_shards == self.rank:
                    yield self.samples[index]
                count += 1


class TinyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        return self.fc(F.relu(self.norm(self.conv(x))).mean((2, 3)))


def main(max_steps=6):
    b, k = flags()
    world_size = env_int("WORLD_SIZE", default=1)
    rank = env_int("SLURM_PROCID", default=0)
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = TinyNet().double()
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    stream = iter(DataLoader(ShardedStream(images(80), rank, world_size), batch_size=b))
    for _ in range(max_steps):
        for micro in range(k):
            if world_size > 1:
                model.require_backward_grad_sync = micro == k - 1
            x, y = next(stream)
            (F.cross_entropy(model(x), y) / k).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
