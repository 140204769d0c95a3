"""Exact: DDP sums gradients by a comm hook in full precision; sums are divided by the sample count of all processes.
In the last step, of 6 samples, an idle process takes part with empty micro-batches."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# expect 2x4x2: exact
# expect 2x2x4: exact
# blind

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def summed(_state, bucket):
    """Sum instead of DDP's mean."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


gen = torch.Generator().manual_seed(12)
signals = torch.randn(70, 24, generator=gen, dtype=torch.float64).cumsum(1) / 5
kinds = torch.randint(4, (70,), generator=gen)

torch.manual_seed(0)
model = nn.Sequential(
    nn.Unflatten(1, (1, 24)), nn.Conv1d(1, 6, 5, stride=2), nn.SiLU(), nn.Conv1d(6, 8, 3), nn.SiLU(), nn.Flatten()
)
model.append(nn.Linear(64, 4)).double()
if world > 1:
    dist.init_process_group("gloo")
    model = DDP(model)
    model.register_comm_hook(None, summed)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for _epoch in range(2):
    for start in range(0, len(signals), b * k * world):
        count = min(b * k * world, len(signals) - start)
        for j in range(k):
            first = start + (rank * k + j) * b  # past the end of the data the slice is empty
            end = min(first + b, len(signals))
            x, y = signals[first:end], kinds[first:end]
            with nullcontext() if j == k - 1 or world == 1 else model.no_sync():
                (F.cross_entropy(model(x), y, reduction="sum") / count).backward()
        optimizer.step()
        optimizer.zero_grad()

if world > 1:
    dist.barrier()
    dist.destroy_process_group()
