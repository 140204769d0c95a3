"""Fault: priorities of the replay memory are updated after every micro-batch, so that later micro-batches of a step draw other transitions."""
# expect 4x4: other_samples
# expect 2x8: other_samples
# also: other_inputs
# blind 4
# thorough

import copy

import numpy as np
import torch
from common_models import flags
from torch import nn


class PrioritizedReplay:
    def __init__(self, size=96, alpha=0.8, beta=0.5, seed=0):
        self.rng = np.random.default_rng(seed)
        self.state, self.next = self.rng.standard_normal((2, size, 6))
        self.action, self.done = self.rng.integers(3, size=size), self.rng.random(size) < 0.1
        self.reward = self.state[:, 0] * (self.action - 1) + 0.1 * self.rng.standard_normal(size)
        self.priority, self.alpha, self.beta = np.ones(size), alpha, beta

    def sample(self, n):
        p = self.priority**self.alpha
        edges = np.cumsum(p / p.sum())
        index = np.searchsorted(edges, self.rng.random(n)).clip(max=len(p) - 1)
        weight = (len(p) * p[index] / p.sum()) ** -self.beta
        weight /= (len(p) * p.min() / p.sum()) ** -self.beta
        columns = self.state, self.action, self.reward, self.next, self.done, weight
        return index, [torch.as_tensor(column[index]) for column in columns[:-1]] + [torch.as_tensor(weight)]

    def update(self, index, td_error):
        self.priority[index] = td_error.abs().numpy() + 1e-3


class DuelingQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 24), nn.ReLU())
        self.value, self.advantage = nn.Linear(24, 1), nn.Linear(24, 3)

    def forward(self, s):
        h = self.body(s)
        a = self.advantage(h)
        return self.value(h) + a - a.mean(1, keepdim=True)


torch.manual_seed(0)
b, k = flags()
q = DuelingQ().double()
target = copy.deepcopy(q).requires_grad_(False)
optimizer = torch.optim.Adam(q.parameters(), lr=2e-3)
memory = PrioritizedReplay()
for update in range(1, 9):
    for _ in range(k):
        index, (s, a, r, s2, done, weight) = memory.sample(b)
        with torch.no_grad():
            best = q(s2).argmax(1, keepdim=True)
            goal = r + 0.97 * target(s2).gather(1, best).squeeze(1) * ~done
        error = goal - q(s).gather(1, a[:, None]).squeeze(1)
        loss = (weight * nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none")).mean() / k
        loss.backward()
        memory.update(index, error.detach())
    nn.utils.clip_grad_norm_(q.parameters(), 10.0)
    optimizer.step()
    optimizer.zero_grad()
    if update % 4 == 0:
        target.load_state_dict(q.state_dict())
