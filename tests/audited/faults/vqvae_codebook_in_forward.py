"""Fault: the codebook of a VQ-VAE follows its codes by an exponential average in every training forward: micro-
batches of a step see other codebooks."""
# expect 4x4: state
# expect 2x8: state
# expect 4x2x2: state
# blind 3
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class VectorQuantizerEMA(nn.Module):
    def __init__(self, codes=12, dim=6, decay=0.8, eps=1e-5):
        super().__init__()
        self.decay, self.eps = decay, eps
        self.register_buffer("embedding", torch.randn(codes, dim))
        self.register_buffer("cluster_size", torch.ones(codes))
        self.register_buffer("sums", self.embedding.clone())

    def forward(self, z):
        index = torch.cdist(z, self.embedding).argmin(-1)
        quantized = self.embedding[index]
        if self.training:
            with torch.no_grad():
                chosen = F.one_hot(index, len(self.embedding)).to(z.dtype)
                self.cluster_size.mul_(self.decay).add_(chosen.sum(0), alpha=1 - self.decay)
                self.sums.mul_(self.decay).add_(chosen.T @ z, alpha=1 - self.decay)
                self.embedding.copy_(self.sums / (self.cluster_size + self.eps)[:, None])
        commitment = F.mse_loss(z, quantized)
        return z + (quantized - z).detach(), commitment


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 6))
        self.quantizer = VectorQuantizerEMA()
        self.decoder = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 20))

    def forward(self, x):
        z, commitment = self.quantizer(self.encoder(x))
        return F.mse_loss(self.decoder(z), x) + 0.25 * commitment


b, k = flags()
torch.manual_seed(0)
model = VQVAE().double()
if world > 1:
    dist.init_process_group("gloo")
    model = DDP(model)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
data = torch.randn(80, 20, generator=torch.Generator().manual_seed(23), dtype=torch.float64).tanh()
for i, start in enumerate(range(rank * b, 80, b * world)):
    boundary = (i + 1) % k == 0
    with contextlib.nullcontext() if boundary or world == 1 else model.no_sync():
        (model(data[start : start + b]) / k).backward()
    if boundary:
        optimizer.step()
        optimizer.zero_grad()
