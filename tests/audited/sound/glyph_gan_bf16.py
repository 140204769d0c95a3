"""Sound: a GAN whose step walks twice over its window: first for the critic, then, with the new critic, for the
generator."""
# expect 4x4: exact
# expect 2x8: exact
# blind 2
# thorough

import os

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
b, k = flags()
g = torch.Generator().manual_seed(35)
glyphs = (torch.rand(80, 1, 8, 8, generator=g) < 0.15).to(dtype)
latent = torch.randn(80, 6, generator=g).to(dtype)  # sample i always has the same noise

torch.manual_seed(0)
generator = nn.Sequential(
    nn.Linear(6, 64), nn.ReLU(), nn.Unflatten(1, (16, 2, 2)), nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ReLU(),
    nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Sigmoid(),
).to(dtype)  # fmt: skip
critic = nn.Sequential(
    nn.Conv2d(1, 8, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 3, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(),
    nn.Linear(64, 1),
).to(dtype)  # fmt: skip
for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99), eps=1e-2)
for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.99), eps=1e-2)
amp = lambda: torch.autocast("cpu", torch.bfloat16, enabled=not FULL)  # noqa: E731

for step in range(5):
    window = [slice(step * 16 + i * b, step * 16 + (i + 1) * b) for i in range(k)]
    for rows in window:
        with amp():
            with torch.no_grad():
                fake = generator(latent[rows])
            real_score, fake_score = critic(glyphs[rows]), critic(fake.to(dtype))
        loss = F.softplus(-real_score.to(dtype)).mean() + F.softplus(fake_score.to(dtype)).mean()
        (loss / k).backward()
    for_critic.step()
    critic.zero_grad()
    critic.requires_grad_(False)
    for rows in window:
        with amp():
            score = critic(generator(latent[rows]))
        (F.softplus(-score.to(dtype)).mean() / k).backward()
    for_generator.step()
    generator.zero_grad()
    critic.requires_grad_(True)
