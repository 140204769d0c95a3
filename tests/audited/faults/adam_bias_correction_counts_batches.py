"""Fault: a home-made Adam corrects its bias by the number of micro-batches so far, not by that of its own steps."""
# expect 4x4: update
# expect 8x1x2: exact
# expect 4x2x2: update
# blind

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Adam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.t = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 1 - beta1)
                state["v"].lerp_(p.grad.square(), 1 - beta2)
                m, v = state["m"] / (1 - beta1**self.t), state["v"] / (1 - beta2**self.t)
                p.sub_(group["lr"] * m / (v.sqrt() + group["eps"]))


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
gen = torch.Generator().manual_seed(61)
x, y = torch.randn(2, 96, 7, generator=gen, dtype=torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(7, 18), nn.SiLU(), nn.Linear(18, 7)).double()
if world > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = Adam(model.parameters())
for inputs, targets in zip(x[rank::world].split(b), y[rank::world].split(b), strict=True):
    optimizer.t += 1
    loss = nn.functional.smooth_l1_loss(model(inputs), targets)
    (loss / k).backward()
    if optimizer.t % k == 0:
        optimizer.step()
        optimizer.zero_grad()
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
