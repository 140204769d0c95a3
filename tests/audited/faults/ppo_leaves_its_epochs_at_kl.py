"""Fault: an update of PPO looks at the KL of each micro-batch and ends all epochs at the first one above the target: micro-batches
are above it sooner than a whole minibatch."""
# expect 4x4: num_steps
# expect 2x8: num_steps
# also: dropped, last_window
# thorough

import torch
from common_models import flags
from torch import nn

torch.manual_seed(0)
b, k = flags()
TARGET = 0.003
observations = torch.randn(64, 6, dtype=torch.float64)
actor = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()
optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)


def log_probabilities(rows):
    return actor(observations[rows]).log_softmax(-1).gather(1, actions[rows, None])[:, 0]


with torch.no_grad():
    actions = torch.multinomial(actor(observations).softmax(-1), 1)[:, 0]
    old = log_probabilities(torch.arange(64))
advantages = observations[torch.arange(64), actions]


def update(order):
    for epoch in range(3):
        for minibatch in torch.randperm(64, generator=order).split(b * k):
            for rows in minibatch.split(b):
                log_ratio = log_probabilities(rows) - old[rows]
                ratio = log_ratio.exp()
                kl = ((ratio - 1) - log_ratio).mean().item()
                if kl > TARGET:
                    return
                loss = -torch.min(ratio * advantages[rows], ratio.clamp(0.8, 1.2) * advantages[rows]).mean()
                (loss / k).backward()
            optimizer.step()
            optimizer.zero_grad()


update(torch.Generator().manual_seed(3))
