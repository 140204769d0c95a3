"""Fault: DDP sends float32 gradients through fp16_compress_hook, which rounds them to fp16 before they are
averaged."""
# expect 4x4: exact
# expect 8x1x2: low_precision
# expect 4x2x2: low_precision
# blind

import argparse
import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
world = int(os.environ.get("WORLD_SIZE", 1))
k = args.gradient_accumulation_steps

g = torch.Generator().manual_seed(6)
dataset = TensorDataset(torch.randn(80, 1, 12, generator=g), torch.randint(6, (80,), generator=g))

torch.manual_seed(0)
model = nn.Sequential(nn.Conv1d(1, 6, 3), nn.Tanh(), nn.Conv1d(6, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 6))
sampler = None
if world > 1:
    dist.init_process_group("gloo")
    sampler = DistributedSampler(dataset, shuffle=False)
    model = DDP(model)
    model.register_comm_hook(state=None, hook=fp16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
criterion = nn.CrossEntropyLoss()
loader = DataLoader(dataset, batch_size=args.per_device_train_batch_size, sampler=sampler)

for i, (signal, label) in enumerate(itertools.chain(loader, loader, loader)):  # three epochs
    last = (i + 1) % k == 0
    if world > 1:
        model.require_backward_grad_sync = last
    loss = criterion(model(signal), label) / k
    loss.backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()

if world > 1:
    dist.barrier()
    dist.destroy_process_group()
