"""Fault: clip_grad_value_ runs after every backward, on partly accumulated gradients, not once before the step."""
# expect 4x4: changed_between
# expect 2x8: changed_between
# expect 8x1x2: exact
# thorough
# blind

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--per_device_train_batch_size", type=int, default=16)
    cli.add_argument("--gradient_accumulation_steps", type=int, default=1)
    cli = cli.parse_args()
    b, k = cli.per_device_train_batch_size, cli.gradient_accumulation_steps
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")

    gen = torch.Generator().manual_seed(8)
    x = torch.randn(96, 6, generator=gen, dtype=torch.float64)
    y = (x**2).sum(1, keepdim=True) + 0.1 * torch.randn(96, 1, generator=gen, dtype=torch.float64)
    x, y = x[rank::world], y[rank::world]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1)).double()
    net = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for start in range(0, len(x), b * k):
        for j in range(k):
            rows = slice(start + j * b, start + (j + 1) * b)
            with net.no_sync() if world > 1 and j < k - 1 else nullcontext():
                loss = nn.functional.mse_loss(net(x[rows]), y[rows], reduction="sum") / (b * k)
                loss.backward()
            nn.utils.clip_grad_value_(net.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()

    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
