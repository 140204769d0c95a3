"""Fault, on several processes only: the order is cut to a multiple of the processes, so the last of 79 samples
is lost."""
# expect 4x4: exact
# expect 8x1x2: dropped
# expect 4x2x2: dropped
# also: batch_size
# blind

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset


class ShardSampler(Sampler):
    """Every world-th sample of an order that all processes share."""

    def __init__(self, length, rank, world, seed=0):
        order = torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
        self.own = order[: length // world * world][rank::world]

    def __iter__(self):
        return iter(self.own)

    def __len__(self):
        return len(self.own)


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
gen = torch.Generator().manual_seed(79)
data = TensorDataset(torch.randn(79, 11, generator=gen, dtype=torch.float64), torch.randint(6, (79,), generator=gen))
loader = DataLoader(data, batch_size=args.per_device_train_batch_size, sampler=ShardSampler(len(data), rank, world))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(11, 16), nn.Sigmoid(), nn.Linear(16, 6)).double()
if world > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def take_step(window):
    count = torch.tensor(float(sum(len(y) for _, y in window)))
    if world > 1:
        dist.all_reduce(count)
    for x, y in window:
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        (loss * world / count).backward()
    optimizer.step()
    optimizer.zero_grad()


window = []
for number, batch in enumerate(loader, 1):
    window.append(batch)
    if len(window) == args.gradient_accumulation_steps or number == len(loader):
        take_step(window)
        window = []

if world > 1:
    dist.barrier()
    dist.destroy_process_group()
