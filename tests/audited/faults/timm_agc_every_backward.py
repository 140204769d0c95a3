"""Fault: adaptive gradient clipping (by the norms of the units) runs after every backward, on a gradient that is not complete, and, with no_sync, not reduced."""
# expect 4x4: changed_between
# expect 2x8: changed_between
# expect 4x2x2: changed_between
# expect 8x1x2: exact
# blind 5
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def unitwise_norm(x):
    return x.norm(2) if x.ndim <= 1 else x.norm(2, dim=tuple(range(1, x.ndim)), keepdim=True)


def adaptive_clip_grad(parameters, clip_factor=0.05, eps=1e-3):
    for p in parameters:
        if p.grad is None:
            continue
        max_norm = unitwise_norm(p.detach()).clamp_(min=eps).mul_(clip_factor)
        grad_norm = unitwise_norm(p.grad)
        clipped = p.grad * (max_norm / grad_norm.clamp(min=1e-6))
        p.grad.copy_(torch.where(grad_norm < max_norm, p.grad, clipped))


class NativeScaler:
    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, need_update=True):
        loss.backward()
        if clip_grad is not None:
            adaptive_clip_grad(parameters, clip_grad)
        if need_update:
            optimizer.step()
            optimizer.zero_grad()


class NfBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(dim, dim, 3, padding=1, groups=2), nn.Conv2d(dim, dim, 1)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x + self.gain * self.conv2(nn.functional.gelu(self.conv1(x)))


def train_one_epoch(model, loader, optimizer, loss_fn, loss_scaler, accum_steps):
    for batch_idx, (input, target) in enumerate(loader):
        need_update = (batch_idx + 1) % accum_steps == 0
        with contextlib.nullcontext() if need_update or world == 1 else model.no_sync():
            loss = loss_fn(model(input), target) / accum_steps
            loss_scaler(loss, optimizer, 0.05, model.parameters(), need_update=need_update)


b, k = flags()
g = torch.Generator().manual_seed(51)
dataset = TensorDataset(torch.randn(80, 3, 8, 8, generator=g).double(), torch.randint(7, (80,), generator=g))
torch.manual_seed(42)
model = nn.Sequential(nn.Conv2d(3, 8, 4, stride=2), NfBlock(8), NfBlock(8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
model = model.append(nn.Linear(8, 7)).double()
if world > 1:
    dist.init_process_group("gloo")
    model = NativeDDP(model)
loader = DataLoader(dataset, b, sampler=DistributedSampler(dataset, world, rank, shuffle=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
train_one_epoch(model, loader, optimizer, nn.CrossEntropyLoss(label_smoothing=0.1), NativeScaler(), k)
