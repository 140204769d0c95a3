"""Exact: each sample goes to one expert of six, so many experts have no work in a micro-batch; DDP finds the unused ones.
There is no balance loss; sums times N are divided by the weights of the step's samples on all processes."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# expect 2x4x2: exact
# thorough
# blind

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Experts(nn.Module):
    def __init__(self, inputs=8, width=10, num=6):
        super().__init__()
        self.router = nn.Linear(inputs, num)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, 1)) for _ in range(num)
        )

    def forward(self, x):
        chance, choice = self.router(x).softmax(1).max(1)
        out = torch.zeros_like(chance)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(choice == i)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]).squeeze(1) * chance[rows])
        return out


def main(b, k, rank, world):
    gen = torch.Generator().manual_seed(33)
    x = torch.randn(77, 8, generator=gen, dtype=torch.float64)
    y = x[:, 0] * x[:, 1].sign() + x[:, 2:].sum(1)
    weight = torch.rand(77, generator=gen, dtype=torch.float64) + 0.1
    torch.manual_seed(0)
    model = Experts().double()
    if world > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for start in range(0, 77, b * k * world):
        rows = slice(start + rank, min(start + b * k * world, 77), world)
        total = weight[rows].sum()
        if world > 1:
            dist.all_reduce(total)
        micro_batches = list(zip(x[rows].split(b), y[rows].split(b), weight[rows].split(b), strict=True))
        for j, (inputs, wanted, w) in enumerate(micro_batches, 1):
            with nullcontext() if world == 1 or j == len(micro_batches) else model.no_sync():
                loss = (w * (model(inputs) - wanted).square()).sum()
                (loss * world / total).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    args = parser.parse_args()
    main(
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        int(os.environ.get("RANK", 0)),
        int(os.environ.get("WORLD_SIZE", 1)),
    )
