"""Fault: DistributedSampler repeats samples to make the shards of 77 samples even, so one sample counts twice."""
# expect 4x4: exact
# expect 8x1x2: duplicated
# expect 4x2x2: duplicated
# thorough
# blind

import argparse
import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
world = int(os.environ.get("WORLD_SIZE", 1))

gen = torch.Generator().manual_seed(77)
pixels = torch.rand(77, 1, 6, 6, generator=gen, dtype=torch.float64)
dataset = TensorDataset(pixels, torch.randint(10, (77,), generator=gen))
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10)).double()
sampler = None
if world > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
    sampler = DistributedSampler(dataset, shuffle=False)
loader = DataLoader(dataset, batch_size=args.per_device_train_batch_size, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(2):
    batches = iter(loader)
    while window := list(itertools.islice(batches, args.gradient_accumulation_steps)):
        count = torch.tensor(sum(len(y) for _, y in window))
        if world > 1:
            dist.all_reduce(count)
        for x, y in window:
            loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
            (loss * world / count).backward()
        optimizer.step()
        optimizer.zero_grad()

if world > 1:
    dist.barrier()
    dist.destroy_process_group()
