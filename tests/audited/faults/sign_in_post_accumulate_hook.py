"""Fault: the sign of the gradient is taken in a post-accumulate hook, at every backward, not once per step."""
# expect 4x4: gradient_hooks
# expect 2x8: gradient_hooks
# expect 8x1x2: gradient_hooks
# thorough
# blind

import os
from argparse import ArgumentParser

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def take_sign(parameter):
    parameter.grad.sign_()


def build_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 20), nn.Tanh(), nn.Linear(20, 3)).double()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(take_sign)
    return model


def batches(b, rank, world, n=96):
    g = torch.Generator().manual_seed(21)
    x, y = torch.randn(n, 9, generator=g, dtype=torch.float64), torch.randint(3, (n,), generator=g)
    yield from zip(x[rank::world].split(b), y[rank::world].split(b), strict=True)


parser = ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps
rank, world, model = int(os.getenv("RANK", "0")), int(os.getenv("WORLD_SIZE", "1")), build_model()
if world > 1:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
for i, (x, y) in enumerate(batches(b, rank, world)):
    (cross_entropy(model(x), y, reduction="sum") / (b * k)).backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
