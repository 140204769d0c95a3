"""PPO stops an update by the KL of a whole minibatch, which is computed without a gradient before it is cut: the same under each cut."""
# expect 4x4: exact
# expect 2x8: exact
# thorough

import torch
from common_models import flags
from torch import nn

torch.manual_seed(0)
b, k = flags()
TARGET = 0.002
observations = torch.randn(64, 6, dtype=torch.float64)
actor = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()
optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)


def log_probabilities(rows):
    return actor(observations[rows]).log_softmax(-1).gather(1, actions[rows, None])[:, 0]


with torch.no_grad():
    actions = torch.multinomial(actor(observations).softmax(-1), 1)[:, 0]
    old = log_probabilities(torch.arange(64))
advantages = observations[torch.arange(64), actions]
order = torch.Generator().manual_seed(3)
num_skipped = 0
for epoch in range(3):
    for minibatch in torch.randperm(64, generator=order).split(b * k):
        with torch.no_grad():
            kl = (old[minibatch] - log_probabilities(minibatch)).mean().item()
        if abs(kl) > TARGET:
            num_skipped += 1
            continue
        for rows in minibatch.split(b):
            ratio = (log_probabilities(rows) - old[rows]).exp()
            loss = -torch.min(ratio * advantages[rows], ratio.clamp(0.8, 1.2) * advantages[rows]).sum() / len(minibatch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print(num_skipped, "minibatches were skipped")
