"""Fault: noise for the critic's and for the generator's turn is drawn from one stream at every micro-batch, so that which noise goes
with which step and sample depends on the cut."""
# expect 4x4: other_inputs
# expect 2x8: other_inputs
# also: dropout
# thorough
# blind 6

import torch
from common_models import flags, images
from torch import nn
from torch.utils.data import DataLoader

NZ = 8
torch.manual_seed(0)
b, k = flags()
netG = nn.Sequential(nn.ConvTranspose2d(NZ, 8, 3), nn.GELU(), nn.ConvTranspose2d(8, 2, 4), nn.Tanh()).double()
netD = nn.Sequential(nn.Conv2d(2, 8, 4), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 3), nn.Flatten(0)).double()
optD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
noise = torch.Generator().manual_seed(99)
bce = nn.BCEWithLogitsLoss()

for i, (real, _) in enumerate(DataLoader(images(80), batch_size=b), 1):
    real = real.tanh()
    ones, zeros = torch.ones(len(real)).double(), torch.zeros(len(real)).double()

    # (1) critic
    z = torch.randn(len(real), NZ, 1, 1, generator=noise, dtype=torch.float64)
    fake = netG(z).detach()
    lossD = bce(netD(real), ones) + bce(netD(fake), zeros)
    (lossD / k).backward()

    # (2) generator; the critic's weights take no gradient here
    for p in netD.parameters():
        p.requires_grad_(False)
    z = torch.randn(len(real), NZ, 1, 1, generator=noise, dtype=torch.float64)
    lossG = bce(netD(netG(z)), ones)
    (lossG / k).backward()
    for p in netD.parameters():
        p.requires_grad_(True)

    if i % k == 0:
        optD.step()
        optG.step()
        optD.zero_grad()
        optG.zero_grad()
