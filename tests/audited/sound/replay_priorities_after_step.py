"""Sound: a quantile network learns from prioritized replay; the priorities that micro-batches give are kept, and enter the memory after the step."""
# expect 4x4: exact
# expect 2x8: exact
# blind 4
# thorough

import copy
import random

import torch
from common_models import flags
from torch import nn

QUANTILES = 8


class SumTree:
    """Leaves hold priorities; a draw walks down from the root."""

    def __init__(self, size):
        self.size, self.nodes = size, [0.0] * (2 * size)

    def set(self, i, value):
        i += self.size
        self.nodes[i] = value
        while i > 1:
            i //= 2
            self.nodes[i] = self.nodes[2 * i] + self.nodes[2 * i + 1]

    def find(self, share):
        i, rest = 1, share * self.nodes[1]
        while i < self.size:
            i *= 2
            if rest >= self.nodes[i]:
                rest -= self.nodes[i]
                i += 1
        return i - self.size


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 24), nn.ELU(), nn.Linear(24, 3 * QUANTILES))

    def forward(self, s):
        return self.net(s).unflatten(1, (3, QUANTILES))


def quantile_losses(z, goal):
    middle = (torch.arange(QUANTILES, dtype=z.dtype) + 0.5) / QUANTILES
    error = goal[:, None] - z[:, :, None]
    below = (middle[:, None] - (error < 0).to(z.dtype)).abs()
    return (below * nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none")).sum(1).mean(1)


g = torch.Generator().manual_seed(36)
state, after = torch.randn(2, 64, 6, generator=g, dtype=torch.float64)
action = torch.randint(3, (64,), generator=g)
reward = state[:, 0] * (action - 1) + 0.2 * torch.randn(64, generator=g, dtype=torch.float64)
tree, dice = SumTree(64), random.Random(0)
for i in range(64):
    tree.set(i, 1.0)

torch.manual_seed(0)
b, k = flags()
critic = Critic().double()
target = copy.deepcopy(critic).requires_grad_(False)
optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
for update in range(6):
    news = []
    for _ in range(k):
        rows = [tree.find(dice.random()) for _ in range(b)]
        weight = torch.tensor([(tree.nodes[1] / tree.nodes[64 + i] / 64) ** 0.4 for i in rows], dtype=torch.float64)
        with torch.no_grad():
            best = target(after[rows]).mean(2).argmax(1)
            goal = reward[rows, None] + 0.9 * target(after[rows])[torch.arange(b), best]
        losses = quantile_losses(critic(state[rows])[torch.arange(b), action[rows]], goal)
        ((weight * losses).sum() / 16).backward()
        news += zip(rows, losses.tolist())
    optimizer.step()
    optimizer.zero_grad()
    for row, loss in news:
        tree.set(row, round(loss, 6) + 0.01)
    for p, slow in zip(critic.parameters(), target.parameters()):
        slow.data.lerp_(p.data, 0.05)
