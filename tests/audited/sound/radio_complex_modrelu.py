"""Sound: a complex-valued network for radio signals with modReLU; complex gradients are averaged through
view_as_real, clipped once by their global norm, and Adam keeps its moments for real and imaginary parts."""
# expect 4x4: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 1
# thorough

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")


class ModReLU(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.bias = nn.Parameter(torch.full((width,), -0.05, dtype=torch.float64))

    def forward(self, z):
        size = (z.real.square() + z.imag.square() + 1e-9).sqrt()
        return z * (F.relu(size + self.bias) / size)


class Modulation(nn.Module):
    """Which of three modulations has a burst of IQ samples?"""

    def __init__(self, length=12, width=10):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(length, width, dtype=torch.cdouble), ModReLU(width), nn.Linear(width, 3, dtype=torch.cdouble)
        )

    def forward(self, z):
        return self.layers(z).abs()


def average(parameters):
    for p in parameters:
        dist.all_reduce(torch.view_as_real(p.grad) if p.is_complex() else p.grad)
        p.grad /= world


def clip(parameters, largest):
    total = torch.stack([p.grad.abs().square().sum() for p in parameters]).sum().sqrt()
    for p in parameters:
        p.grad *= (largest / (total + 1e-6)).clamp(max=1.0)


torch.manual_seed(0)
b, k = flags()
g = torch.Generator().manual_seed(61)
bursts = torch.randn(80, 12, generator=g, dtype=torch.cdouble)
kinds = torch.randint(3, (80,), generator=g)
bursts = bursts + torch.exp(1j * torch.arange(12) * (kinds[:, None] + 1))
mine = torch.arange(80).view(-1, world, b)[:, rank].flatten()
model = Modulation()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for i, (z, kind) in enumerate(DataLoader(TensorDataset(bursts[mine], kinds[mine]), batch_size=b)):
    (F.cross_entropy(model(z), kind) / k).backward()
    if (i + 1) % k == 0:
        parameters = list(model.parameters())
        if world > 1:
            average(parameters)
        clip(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
