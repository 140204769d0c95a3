"""Fault: the weight of the adversarial term is the ratio of two gradient norms at the last layer (taming transformers),
taken from the micro-batch: every micro-batch weighs its adversarial term in its own way."""

# expect 4x4: mixed_loss
# expect 2x8: mixed_loss
# also: not_a_sum
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


class Autoencoder(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(2, width, 3, stride=2, padding=1), nn.SiLU(), nn.Conv2d(width, 3, 1))
        self.dec = nn.Sequential(nn.ConvTranspose2d(3, width, 2, stride=2), nn.SiLU())
        self.conv_out = nn.Conv2d(width, 2, 3, padding=1)

    def forward(self, x):
        return self.conv_out(self.dec(self.enc(x)))


def adaptive_weight(rec_loss, g_loss, last_layer, discriminator_weight=0.8):
    (rec,) = torch.autograd.grad(rec_loss, last_layer, retain_graph=True)
    (adv,) = torch.autograd.grad(g_loss, last_layer, retain_graph=True)
    weight = torch.norm(rec) / (torch.norm(adv) + 1e-4)
    return torch.clamp(weight, 0.0, 1e4).detach() * discriminator_weight


def hinge_d_loss(real, fake):
    return 0.5 * (F.relu(1.0 - real).mean() + F.relu(1.0 + fake).mean())


ae = Autoencoder().double()
disc = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 3, padding=1)).double()
opt_ae = torch.optim.Adam(ae.parameters(), lr=1e-3, betas=(0.5, 0.9))
opt_disc = torch.optim.Adam(disc.parameters(), lr=1e-3, betas=(0.5, 0.9))

for i, (x, _) in enumerate(DataLoader(images(64), batch_size=b)):
    recon = ae(x)
    rec_loss = (x - recon).abs().mean()
    g_loss = -disc(recon).mean()
    d_weight = adaptive_weight(rec_loss, g_loss, ae.conv_out.weight)
    ((rec_loss + d_weight * g_loss) / k).backward(inputs=list(ae.parameters()))
    (hinge_d_loss(disc(x), disc(recon.detach())) / k).backward()
    if (i + 1) % k == 0:
        for optimizer in (opt_ae, opt_disc):
            optimizer.step()
            optimizer.zero_grad()
