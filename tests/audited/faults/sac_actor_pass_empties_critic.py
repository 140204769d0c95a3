"""Fault: the gradient that the actor's loss leaves in the critics is thrown away by critics.zero_grad() in every micro-batch, and
with it the critics' own gradient of the micro-batches before: only the last one counts for them."""

# expect 4x4: emptied_between
# expect 2x8: emptied_between
# expect 8x2: emptied_between
# blind 7
# thorough
# open
import copy

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 24), nn.ReLU(), nn.Linear(24, o))


class Critics(nn.Module):
    def __init__(self, obs, act):
        super().__init__()
        self.q1, self.q2 = mlp(obs + act, 1), mlp(obs + act, 1)

    def forward(self, obs, act):
        x = torch.cat([obs, act], -1)
        return self.q1(x).squeeze(-1), self.q2(x).squeeze(-1)


class Actor(nn.Module):
    def __init__(self, obs, act):
        super().__init__()
        self.net = mlp(obs, 2 * act)

    def forward(self, obs, noise):
        mean, log_std = self.net(obs).chunk(2, -1)
        log_std = log_std.clamp(-5, 1)
        raw = mean + log_std.exp() * noise
        log_prob = (-0.5 * noise**2 - log_std - torch.log(1 - torch.tanh(raw) ** 2 + 1e-6)).sum(-1)
        return torch.tanh(raw), log_prob


def replay(n=80, obs=6, act=2):
    g = torch.Generator().manual_seed(1)

    def draw(*size):
        return torch.randn(*size, generator=g, dtype=torch.float64)

    return TensorDataset(draw(n, obs), draw(n, act).tanh(), draw(n), draw(n, obs), draw(n, act), draw(n, act))


torch.manual_seed(0)
b, k = flags()
actor, critics = Actor(6, 2).double(), Critics(6, 2).double()
target = copy.deepcopy(critics).requires_grad_(False)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
critic_optimizer = torch.optim.Adam(critics.parameters(), lr=3e-3)
alpha, gamma, tau = 0.1, 0.98, 0.05
for i, (obs, act, reward, nxt, noise, nxt_noise) in enumerate(DataLoader(replay(), batch_size=b)):
    new_act, log_prob = actor(obs, noise)
    actor_loss = (alpha * log_prob - torch.min(*critics(obs, new_act))).mean()
    (actor_loss / k).backward()
    critics.zero_grad()  # the actor's loss reaches the critics too

    with torch.no_grad():
        nxt_act, nxt_log_prob = actor(nxt, nxt_noise)
        backup = reward + gamma * (torch.min(*target(nxt, nxt_act)) - alpha * nxt_log_prob)
    q1, q2 = critics(obs, act)
    critic_loss = F.mse_loss(q1, backup) + F.mse_loss(q2, backup)
    (critic_loss / k).backward()

    if (i + 1) % k == 0:
        critic_optimizer.step()
        actor_optimizer.step()
        critic_optimizer.zero_grad()
        actor_optimizer.zero_grad()
        with torch.no_grad():
            for p, t in zip(critics.parameters(), target.parameters()):
                t.lerp_(p, tau)
