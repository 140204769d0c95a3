"""Fault: spectral normalization makes a power iteration at every forward, so the weights in use change within a
step."""
# expect 4x4: state
# expect 2x8: state
# expect 8x1x2: exact
# blind

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm


def build():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(14, 24), nn.LeakyReLU(0.2), nn.Linear(24, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1)
    ).double()
    for i in (0, 2):
        spectral_norm(model[i])
    return model


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
model = build()
if world > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)

# hinge loss of a discriminator: real samples are +1, generated ones -1
gen = torch.Generator().manual_seed(12)
x = torch.randn(80, 14, generator=gen, dtype=torch.float64)
sign = torch.randint(2, (80,), generator=gen).double() * 2 - 1
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (real_or_fake, s) in enumerate(zip(x[rank::world].split(b), sign[rank::world].split(b), strict=True), 1):
    hinge = (1 - s * model(real_or_fake)[:, 0]).relu().sum()
    (hinge / (b * k)).backward()
    if i % k == 0:
        optimizer.step()
        optimizer.zero_grad()

if world > 1:
    dist.barrier()
    dist.destroy_process_group()
