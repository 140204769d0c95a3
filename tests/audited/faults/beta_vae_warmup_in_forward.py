"""Fault: the weight of the KL term is warmed up by a counter that the VAE's forward advances: with more micro-batches
per step it rises faster, and within a step."""

# expect 4x4: state
# expect 8x2: state
# blind 7
# thorough
# open
import torch
import torch.nn.functional as F
from common_models import flags, images
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
LATENT = 4


class BetaVAE(nn.Module):
    def __init__(self, beta=4.0, warmup=10):
        super().__init__()
        self.enc = nn.Sequential(nn.Flatten(), nn.Linear(72, 32), nn.ReLU(), nn.Linear(32, 2 * LATENT))
        self.dec = nn.Sequential(nn.Linear(LATENT, 32), nn.ReLU(), nn.Linear(32, 72))
        self.beta, self.warmup = beta, warmup
        self.num_iter = 0

    def forward(self, x, eps):
        self.num_iter += 1
        mu, log_var = self.enc(x).chunk(2, dim=1)
        recon = self.dec(mu + eps * torch.exp(0.5 * log_var))
        return recon, mu, log_var

    def loss_function(self, x, recon, mu, log_var):
        recon_loss = F.mse_loss(recon, x.flatten(1), reduction="none").sum(1).mean()
        kld = (-0.5 * (1 + log_var - mu**2 - log_var.exp()).sum(1)).mean()
        weight = self.beta * min(1.0, self.num_iter / self.warmup)
        return recon_loss + weight * kld


eps = torch.randn(96, LATENT, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
data = [(x, eps[i]) for i, (x, _) in enumerate(images(96))]
model = BetaVAE().double()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for i, (x, noise) in enumerate(DataLoader(data, batch_size=b)):
    loss = model.loss_function(x, *model(x, noise))
    (loss / k).backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
