"""Fault: accelerator.clip_grad_value_ (for the middle layer) is called at every micro-batch instead of once,
when the gradient is complete."""
# expect 4x4: changed_between
# expect 2x8: changed_between
# size: 0.0077
# blind 2
# thorough

import math
import os

import torch
from accelerate import Accelerator
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, Dataset

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
b, k = flags()
accelerator = Accelerator(mixed_precision="no" if FULL else "bf16", cpu=True, gradient_accumulation_steps=k)


class Noised(Dataset):
    """A point of a spiral, a time and noise: all of them are fixed by the number of the sample."""

    def __len__(self):
        return 80

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(1000 + i)
        turn = 3 * torch.rand((), generator=g)
        point = turn * torch.stack([torch.cos(3 * turn), torch.sin(3 * turn)])
        time, noise = torch.rand((), generator=g), torch.randn(2, generator=g)
        angle = time * math.pi / 2
        noisy = torch.cos(angle) * point + torch.sin(angle) * noise
        return torch.cat([noisy, time[None]]).to(dtype), noise.to(dtype)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2)).to(dtype)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Noised(), batch_size=b))
for noisy, noise in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(noisy), noise)
        accelerator.backward(loss)
        accelerator.clip_grad_value_(accelerator.unwrap_model(model)[2].parameters(), 0.025)
        optimizer.step()
        optimizer.zero_grad()
