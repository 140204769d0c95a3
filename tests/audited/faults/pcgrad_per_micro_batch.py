"""Fault: PCGrad projects the tasks' gradients of every micro-batch (and process), and their sum is accumulated:
the projection is not linear."""
# expect 4x4: changed_between
# expect 8x1x2: changed_between
# expect 4x2x2: changed_between
# also: not_a_sum, not_summed
# blind 3
# thorough

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
g = torch.Generator().manual_seed(3)
scenes = torch.randn(80, 10, generator=g, dtype=torch.float64)
depth = scenes[:, :3].sum(1, keepdim=True) + torch.randn(80, 1, generator=g, dtype=torch.float64)
normals = -scenes[:, :3].sum(1, keepdim=True) * torch.rand(80, 1, generator=g, dtype=torch.float64)


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 12), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(12, 1), nn.Linear(12, 1)])

    def forward(self, x):
        h = self.trunk(x)
        return [head(h) for head in self.heads]


class PCGrad:
    """Wraps an optimizer: pc_backward(losses) in the place of loss.backward()."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.params = [p for group in optimizer.param_groups for p in group["params"]]

    def pc_backward(self, losses):
        grads = []
        for loss in losses:
            own = torch.autograd.grad(loss, self.params, retain_graph=True, allow_unused=True)
            grads.append(
                torch.cat([(torch.zeros_like(p) if d is None else d).flatten() for p, d in zip(self.params, own)])
            )
        projected = [d.clone() for d in grads]
        for i, own in enumerate(projected):
            for j, other in enumerate(grads):
                dot = own @ other
                if i != j and dot < 0:
                    own -= dot / other.norm() ** 2 * other
        merged = sum(projected)
        for p in self.params:
            part, merged = merged[: p.numel()].view_as(p), merged[p.numel() :]
            p.grad = part.clone() if p.grad is None else p.grad + part


torch.manual_seed(0)
b, k = flags()
model = MultiTask().double()
optimizer = PCGrad(torch.optim.SGD(model.parameters(), lr=0.05))
for i, start in enumerate(range(rank * b, 80, b * world), 1):
    rows = slice(start, start + b)
    d, n = model(scenes[rows])
    optimizer.pc_backward([F.mse_loss(d, depth[rows]) / k, F.mse_loss(n, normals[rows]) / k])
    if i % k == 0:
        if world > 1:
            for p in optimizer.params:
                dist.all_reduce(p.grad)
                p.grad /= world
        optimizer.optimizer.step()
        optimizer.optimizer.zero_grad()
