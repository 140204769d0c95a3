"""Fault: an autoencoder draws its latent noise in the forward from the global generator, per micro-batch and
process."""
# expect 4x4: dropout
# expect 2x8: dropout
# expect 8x1x2: dropout
# thorough
# blind

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class VAE(nn.Module):
    def __init__(self, width=20, latent=3):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 16), nn.ReLU(), nn.Linear(16, width))

    def forward(self, x):
        mean, log_var = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decoder(z), mean, log_var


def negative_elbo(x, reconstruction, mean, log_var):
    kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum()
    return F.binary_cross_entropy_with_logits(reconstruction, x, reduction="sum") + kl


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
data = (torch.rand(96, 20, generator=torch.Generator().manual_seed(20)) < 0.4).double()
torch.manual_seed(0)
vae = VAE().double()
if world > 1:
    dist.init_process_group("gloo")
    vae = DistributedDataParallel(vae)
optimizer = torch.optim.Adam(vae.parameters(), lr=3e-3)
for i, x in enumerate(data[rank::world].split(b)):
    if i % k == 0:
        optimizer.zero_grad()
    loss = negative_elbo(x, *vae(x)) / (b * k)
    loss.backward()
    if i % k == k - 1:
        optimizer.step()
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
