"""Fault: every process shuffles with a seed that contains its rank before it takes its shard, so the shards
overlap."""
# expect 4x4: exact
# expect 8x1x2: other_inputs
# expect 4x2x2: other_inputs
# thorough
# also: other_samples
# blind

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

EPOCHS, SEED = 2, 1234


def average(gradient, world):
    if world > 1:
        dist.all_reduce(gradient)
    gradient /= world


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")

g = torch.Generator().manual_seed(50)
users, items = torch.randint(15, (96,), generator=g), torch.randint(25, (96,), generator=g)
ratings = torch.rand(96, generator=g, dtype=torch.float64)
torch.manual_seed(0)
model = nn.ModuleDict({"user": nn.Embedding(15, 6), "item": nn.Embedding(25, 6)}).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
shuffle = torch.Generator().manual_seed(SEED + rank)
for _ in range(EPOCHS):
    for i, rows in enumerate(torch.randperm(96, generator=shuffle)[rank::world].split(b), 1):
        score = (model["user"](users[rows]) * model["item"](items[rows])).sum(1)
        loss = (score - ratings[rows]).square().mean() / k  # 96 ratings: all micro-batches are full
        loss.backward()
        if i % k == 0:
            for p in model.parameters():
                average(p.grad, world)
            optimizer.step()
            optimizer.zero_grad()

if world > 1:
    dist.barrier()
    dist.destroy_process_group()
