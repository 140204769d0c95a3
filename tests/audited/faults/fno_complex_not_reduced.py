"""Fault: a hand-written all-reduce takes the gradients for which is_floating_point() holds, which leaves out
the complex spectral weights: every process keeps its own."""
# expect 4x4: exact
# expect 8x1x2: not_reduced
# expect 4x2x2: not_reduced
# blind 1
# thorough

import os

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")


class SpectralConv(nn.Module):
    def __init__(self, width, modes):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.complex128) / width)

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        out = torch.zeros_like(spectrum)
        out[..., : self.modes] = torch.einsum("bim,iom->bom", spectrum[..., : self.modes], self.weight)
        return torch.fft.irfft(out, n=x.shape[-1])


class FNO(nn.Module):
    def __init__(self, width=6, modes=4, depth=2):
        super().__init__()
        self.lift, self.lower = nn.Conv1d(1, width, 1), nn.Conv1d(width, 1, 1)
        self.spectral = nn.ModuleList(SpectralConv(width, modes) for _ in range(depth))
        self.local = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(depth))
        for layer in (self.lift, self.lower, *self.local):
            layer.double()

    def forward(self, x):
        h = self.lift(x)
        for spectral, local in zip(self.spectral, self.local):
            h = torch.nn.functional.gelu(spectral(h) + local(h))
        return self.lower(h)


def all_reduce_gradients(parameters):
    """One flat bucket, cheaper than a call per tensor."""
    grads = [p.grad for p in parameters if p.grad is not None and p.grad.is_floating_point()]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    for g, reduced in zip(grads, flat.div_(world).split([g.numel() for g in grads])):
        g.copy_(reduced.view_as(g))


torch.manual_seed(0)
b, k = flags()
start = torch.randn(80, 1, 16, generator=torch.Generator().manual_seed(19), dtype=torch.float64).cumsum(-1) / 4
dataset = TensorDataset(start, start.roll(3, -1) * 0.8)
model = FNO()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
loader = DataLoader(torch.utils.data.Subset(dataset, range(rank, 80, world)), batch_size=b)
for i, (u0, u1) in enumerate(loader):
    ((model(u0) - u1).square().mean() / k).backward()
    if (i + 1) % k == 0:
        if world > 1:
            all_reduce_gradients(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
