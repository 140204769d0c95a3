"""Fault: the target network of Q-learning is moved (Polyak) after every micro-batch instead of after every
optimizer step."""
# expect 4x4: average
# expect 2x8: average
# also: not_a_sum
# blind 1
# thorough

import copy

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn

b, k = flags()
torch.manual_seed(3)
GAMMA, TAU = 0.95, 0.2


class ReplayMemory:
    """Transitions of an old policy, replayed in order."""

    def __init__(self, n=96):
        g = torch.Generator().manual_seed(8)
        self.state = torch.randn(n, 6, generator=g, dtype=torch.float64)
        self.action = torch.randint(3, (n, 1), generator=g)
        self.next_state = 0.8 * self.state + torch.randn(n, 6, generator=g, dtype=torch.float64)
        self.reward = self.next_state[:, 0] + 1.0
        self.done = (torch.rand(n, generator=g) < 0.1).double()

    def batches(self, size):
        for at in range(0, len(self.state), size):
            rows = slice(at, at + size)
            yield self.state[rows], self.action[rows], self.reward[rows], self.next_state[rows], self.done[rows]


policy_net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3)).double()
target_net = copy.deepcopy(policy_net).requires_grad_(False)
optimizer = torch.optim.RMSprop(policy_net.parameters(), lr=0.01)


def soft_update():
    with torch.no_grad():
        for target, online in zip(target_net.parameters(), policy_net.parameters()):
            target.lerp_(online, TAU)


for i, (state, action, reward, next_state, done) in enumerate(ReplayMemory().batches(b)):
    q = policy_net(state).gather(1, action).squeeze(1)
    with torch.no_grad():
        best = policy_net(next_state).argmax(1, keepdim=True)  # double DQN
        value = target_net(next_state).gather(1, best).squeeze(1)
    loss = F.smooth_l1_loss(q, reward + GAMMA * (1 - done) * value) / k
    loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
    soft_update()
