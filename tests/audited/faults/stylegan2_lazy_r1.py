"""Fault: the lazy R1 penalty is due at every second batch, and counts micro-batches: in place of the whole of every
second step, half of the micro-batches of every step have it."""

# expect 4x4: not_a_sum
# expect 8x2: not_a_sum
# also: ticks_per_micro_step
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
R1, D_REG_EVERY, NZ = 10.0, 2, 6

discriminator = nn.Sequential(
    nn.Conv2d(2, 8, 3, padding=1), nn.Softplus(), nn.Conv2d(8, 8, 3), nn.Softplus(), nn.Flatten(), nn.Linear(128, 1)
).double()
generator = nn.Sequential(nn.Linear(NZ, 32), nn.Softplus(), nn.Linear(32, 72), nn.Unflatten(1, (2, 6, 6))).double()


def d_logistic_loss(real_pred, fake_pred):
    return F.softplus(-real_pred).mean() + F.softplus(fake_pred).mean()


def d_r1_loss(real_pred, real_img):
    (grad_real,) = torch.autograd.grad(outputs=real_pred.sum(), inputs=real_img, create_graph=True)
    return grad_real.pow(2).reshape(grad_real.shape[0], -1).sum(1).mean()


ratio = D_REG_EVERY / (D_REG_EVERY + 1)
g_optim = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.0, 0.99))
d_optim = torch.optim.Adam(discriminator.parameters(), lr=2e-3 * ratio, betas=(0.0, 0.99**ratio))

latents = torch.randn(64, NZ, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
data = [(x, z) for (x, _), z in zip(images(64), latents)]
for i, (real, z) in enumerate(DataLoader(data, batch_size=b)):
    real.requires_grad_(True)
    fake = generator(z)
    real_pred = discriminator(real)
    d_loss = d_logistic_loss(real_pred, discriminator(fake.detach()))
    if i % D_REG_EVERY == 0:
        d_loss = d_loss + R1 / 2 * d_r1_loss(real_pred, real) * D_REG_EVERY
    (d_loss / k).backward(inputs=list(discriminator.parameters()))
    g_loss = F.softplus(-discriminator(fake)).mean()
    (g_loss / k).backward(inputs=list(generator.parameters()))
    if (i + 1) % k == 0:
        d_optim.step()
        g_optim.step()
        d_optim.zero_grad()
        g_optim.zero_grad()
