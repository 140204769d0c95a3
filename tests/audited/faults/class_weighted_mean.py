"""Fault: the class-weighted cross entropy is averaged per micro-batch, though the classes in each have other
weights."""
# expect 4x4: mean_of_means
# expect 2x8: mean_of_means
# expect 8x1x2: mean_of_means
# thorough
# blind

import argparse
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
k, world = args.gradient_accumulation_steps, int(os.environ.get("WORLD_SIZE", 1))

# transactions: one in eight is fraud, and weighs accordingly
gen = torch.Generator().manual_seed(31)
features = torch.randn(80, 10, generator=gen, dtype=torch.float64)
is_fraud = (torch.rand(80, generator=gen) < 0.125).long()
dataset = TensorDataset(features, is_fraud)
weight = len(is_fraud) / torch.bincount(is_fraud, minlength=2).double()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 16), nn.GELU(), nn.Linear(16, 2)).double()
sampler = None
if world > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
    sampler = DistributedSampler(dataset, shuffle=False)
criterion = nn.CrossEntropyLoss(weight=weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(dataset, batch_size=args.per_device_train_batch_size, sampler=sampler)
for _ in range(2):
    for step, (x, y) in enumerate(loader, 1):
        (criterion(model(x), y) / k).backward()
        if step % k == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

if world > 1:
    dist.barrier()
    dist.destroy_process_group()
