"""Fault, on several processes only: accumulated gradients are summed over the processes after each backward, so the
earlier micro-batches of a window are summed again."""
# expect 4x4: exact
# expect 8x1x2: exact
# expect 4x2x2: changed_between
# expect 2x4x2: changed_between
# thorough
# also: reductions
# blind

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")


def backward(loss, model):
    loss.backward()
    if world > 1:
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(flat, op=dist.ReduceOp.SUM)
        offset = 0
        for p in model.parameters():
            p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()


gen = torch.Generator().manual_seed(41)
signal = torch.randn(96, 2, 12, generator=gen, dtype=torch.float64)
label = torch.randint(2, (96,), generator=gen).double()
torch.manual_seed(0)
model = nn.Sequential(nn.Conv1d(2, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(60, 1)).double()
bce = nn.BCEWithLogitsLoss(reduction="sum")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
micro_batches = zip(signal[rank::world].split(b), label[rank::world].split(b), strict=True)
for number, (x, y) in enumerate(micro_batches, 1):
    loss = bce(model(x).squeeze(1), y) / (b * k * world)
    backward(loss, model)
    if number % k == 0:
        optimizer.step()
        optimizer.zero_grad()

if world > 1:
    dist.barrier()
    dist.destroy_process_group()
