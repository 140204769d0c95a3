"""Sound: WGAN-GP lets the critic accumulate over a whole window before it steps, and every second window the
generator goes over the same micro-batches against the new critic; interpolation weights belong to the
samples."""
# expect 4x4: exact
# expect 2x8: exact
# blind 1
# thorough

import torch
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

Z, CRITIC_STEPS, PENALTY = 3, 2, 5.0


def gradient_penalty(critic, real, fake, alpha):
    between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


class Trainer:
    def __init__(self):
        self.generator = nn.Sequential(nn.Linear(Z, 20), nn.Tanh(), nn.Linear(20, 4)).double()
        self.critic = nn.Sequential(nn.Linear(4, 20), nn.Softplus(), nn.Linear(20, 1)).double()
        self.opt_generator = torch.optim.Adam(self.generator.parameters(), lr=4e-3, betas=(0.0, 0.9))
        self.opt_critic = torch.optim.Adam(self.critic.parameters(), lr=4e-3, betas=(0.0, 0.9))

    def update_critic(self, window):
        self.critic.requires_grad_(True)
        for real, z, alpha in window:
            with torch.no_grad():
                fake = self.generator(z)
            loss = self.critic(fake).mean() - self.critic(real).mean()
            loss = loss + PENALTY * gradient_penalty(self.critic, real, fake, alpha)
            (loss / len(window)).backward()
        self.opt_critic.step()
        self.opt_critic.zero_grad()

    def update_generator(self, window):
        self.critic.requires_grad_(False)
        for _, z, _ in window:
            (-self.critic(self.generator(z)).mean() / len(window)).backward()
        self.opt_generator.step()
        self.opt_generator.zero_grad()


torch.manual_seed(0)
b, k = flags()
g = torch.Generator().manual_seed(47)
real = torch.randn(80, 4, generator=g, dtype=torch.float64) * torch.tensor([2.0, 1.0, 0.5, 0.1]) + 1
latent, alpha = (
    torch.randn(80, Z, generator=g, dtype=torch.float64),
    torch.rand(80, 1, generator=g, dtype=torch.float64),
)
loader = DataLoader(TensorDataset(real, latent, alpha), batch_size=b)
trainer, windows = Trainer(), 0
for epoch in range(3):
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) < k:
            continue
        trainer.update_critic(window)
        windows += 1
        if windows % CRITIC_STEPS == 0:
            trainer.update_generator(window)
        window = []
