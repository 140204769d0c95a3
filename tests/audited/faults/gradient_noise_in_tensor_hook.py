"""Fault: a tensor hook adds gradient noise at every backward, so a step gets noise k times."""
# expect 4x4: gradient_hooks
# expect 2x8: gradient_hooks
# expect 8x1x2: exact
# thorough
# blind

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def autoencoder(size=10, code=3):
    return nn.Sequential(nn.Linear(size, code), nn.GELU(), nn.Linear(code, size)).double()


def add_gradient_noise(parameter, seed, sigma=0.01):
    gen = torch.Generator().manual_seed(seed)
    parameter.register_hook(lambda g: g + sigma * torch.randn(g.shape, generator=gen, dtype=g.dtype))


def train(b, k, rank, world):
    gen = torch.Generator().manual_seed(4)
    data = torch.randn(80, 10, generator=gen, dtype=torch.float64)[rank::world]
    torch.manual_seed(0)
    model = autoencoder()
    for i, p in enumerate(model.parameters()):
        add_gradient_noise(p, seed=100 + i)
    model = DDP(model) if world > 1 else model
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for i, x in enumerate(data.split(b), 1):
        ((model(x) - x).square().mean() / k).backward()  # every micro-batch is full
        if i % k == 0:
            opt.step()
            opt.zero_grad(set_to_none=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    a = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    train(a.per_device_train_batch_size, a.gradient_accumulation_steps, rank, world)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
