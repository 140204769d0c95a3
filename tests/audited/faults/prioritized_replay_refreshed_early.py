"""Fault: every micro-batch is drawn from the prioritized replay buffer after the priorities of the micro-batch before it were refreshed: the transitions of a step depend on how it is cut."""
# expect 4x4: other_samples
# expect 2x8: other_samples
# also: other_inputs, duplicated
# blind 5
# thorough

import copy

import torch
from common_models import flags
from torch import nn

b, k = flags()


class PrioritizedReplayBuffer:
    def __init__(self, transitions, alpha=0.6, beta=0.4, seed=7):
        self.transitions, self.alpha, self.beta = transitions, alpha, beta
        self.priorities = torch.ones(len(transitions[0]), dtype=torch.float64)
        self.generator = torch.Generator().manual_seed(seed)

    def sample(self, batch_size):
        p = self.priorities**self.alpha
        p = p / p.sum()
        indices = torch.multinomial(p, batch_size, replacement=True, generator=self.generator)
        weights = (len(p) * p) ** -self.beta
        return indices, (weights / weights.max())[indices], tuple(t[indices] for t in self.transitions)

    def update_priorities(self, indices, td_error):
        self.priorities[indices] = td_error.abs() + 1e-3


def collect(n=160):
    g = torch.Generator().manual_seed(54)
    observation, after = torch.randn(2, n, 6, generator=g, dtype=torch.float64)
    action = torch.randint(3, (n,), generator=g)
    reward = observation[:, 0] * (action - 1) + 0.1 * torch.randn(n, generator=g)
    return observation, action, reward, after, (torch.rand(n, generator=g) < 0.1).double()


torch.manual_seed(0)
q = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 3)).double()
target_q = copy.deepcopy(q).requires_grad_(False)
optimizer = torch.optim.Adam(q.parameters(), lr=1e-3, eps=1e-4)
buffer = PrioritizedReplayBuffer(collect())
for update in range(6):
    optimizer.zero_grad()
    for _ in range(k):
        indices, weights, (observation, action, reward, after, done) = buffer.sample(b)
        best = q(after).argmax(1, keepdim=True)  # double DQN
        value = reward + 0.98 * (1 - done) * target_q(after).gather(1, best).squeeze(1)
        td_error = q(observation).gather(1, action[:, None]).squeeze(1) - value.detach()
        (weights * td_error**2).mean().div(k).backward()
        buffer.update_priorities(indices, td_error.detach())
    nn.utils.clip_grad_norm_(q.parameters(), 10.0)
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target_q.parameters(), q.parameters()):
            slow.lerp_(fast, 0.05)
