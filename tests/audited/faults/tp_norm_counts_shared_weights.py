"""Fault: the norm by which gradients are clipped sums the squares of all processes of the tensor parallel group, those of weights
that each process has whole, too. As https://github.com/NVIDIA-NeMo/RL/pull/3788 has it."""
# expect 16x1x2: norm_counts_replicas
# expect 8x2x2: norm_counts_replicas

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps
torch.manual_seed(0)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 32), nn.Linear(32, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


model, group = Classifier(), None
if int(os.environ.get("WORLD_SIZE", 1)) > 1:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    group = mesh.get_group()
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def get_grad_norm():
    local = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
    total = sum(g.norm() ** 2 for g in local)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt()


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = torch.randn(64, 12), torch.randint(5, (64,))
for first in range(0, len(x), b * k):
    for at in range(first, first + b * k, b):
        (nn.functional.cross_entropy(model(x[at : at + b]), y[at : at + b]) / k).backward()
    norm = get_grad_norm()
    for p in model.parameters():
        p.grad.mul_(min(1.0, 0.05 / norm.item()))
    print(f"step {first // (b * k) + 1}: grad_norm {norm.item():.4f}")
    optimizer.step()
    optimizer.zero_grad()
