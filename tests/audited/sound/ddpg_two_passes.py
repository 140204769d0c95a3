"""Sound: the critic's window is done before the actor's, which runs through a frozen critic; the targets follow
after every step, not every micro-batch."""
# expect 4x4: exact
# expect 2x8: exact
# blind 3
# thorough

import copy

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn

GAMMA, TAU = 0.95, 0.1


def net(inputs, outputs, *last):
    return nn.Sequential(nn.Linear(inputs, 24), nn.ReLU(), nn.Linear(24, outputs), *last).double()


class Replay:
    def __init__(self, n=80):
        g = torch.Generator().manual_seed(31)
        self.state, self.next = torch.randn(2, n, 5, generator=g, dtype=torch.float64)
        self.action = torch.rand(n, 2, generator=g, dtype=torch.float64) * 2 - 1
        self.reward = torch.randn(n, 1, generator=g, dtype=torch.float64)
        self.done = (torch.rand(n, 1, generator=g) < 0.1).double()

    def minibatches(self, rows, size):
        for part in rows.split(size):
            yield tuple(t[part] for t in (self.state, self.action, self.reward, self.next, self.done))


def polyak(target, source):
    with torch.no_grad():
        for t, s in zip(target.parameters(), source.parameters()):
            t.mul_(1 - TAU).add_(TAU * s)


torch.manual_seed(0)
b, k = flags()
actor, critic, replay = net(5, 2, nn.Tanh()), net(7, 1), Replay()
actor_target, critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
order = torch.randperm(80, generator=torch.Generator().manual_seed(32))
for rows in order.split(16):
    for state, action, reward, following, done in replay.minibatches(rows, b):
        with torch.no_grad():
            q_next = critic_target(torch.cat([following, actor_target(following)], 1))
            goal = reward + GAMMA * (1 - done) * q_next
        (F.mse_loss(critic(torch.cat([state, action], 1)), goal) / k).backward()
    critic_optimizer.step()
    critic_optimizer.zero_grad()

    critic.requires_grad_(False)
    for state, *_ in replay.minibatches(rows, b):
        (-critic(torch.cat([state, actor(state)], 1)).mean() / k).backward()
    critic.requires_grad_(True)
    actor_optimizer.step()
    actor_optimizer.zero_grad()

    polyak(actor_target, actor)
    polyak(critic_target, critic)
