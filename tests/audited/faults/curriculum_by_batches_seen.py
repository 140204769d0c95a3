"""Fault: the curriculum lengthens what is seen of a sequence with every batch, and counts micro-batches: it
grows k times too fast."""
# expect 4x4: other_inputs
# expect 2x8: other_inputs
# blind 3
# thorough

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FULL_LENGTH = 30


class Curriculum:
    """The share of a recording that is shown: from a fifth to everything within `total` batches."""

    def __init__(self, total, start=0.2):
        self.total, self.start, self.seen = total, start, 0

    def step(self):
        self.seen += 1

    @property
    def length(self):
        share = min(1.0, self.start + (1 - self.start) * self.seen / self.total)
        return max(2, round(FULL_LENGTH * share))


class Activity(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(4, 20, batch_first=True)
        self.classify = nn.Linear(20, 5)

    def forward(self, x):
        states, _ = self.rnn(x)
        return self.classify(states.mean(1))


torch.manual_seed(0)
b, k = flags()
g = torch.Generator().manual_seed(2)
recordings = torch.randn(80, FULL_LENGTH, 4, generator=g, dtype=torch.float64).cumsum(1) * 0.3
data = TensorDataset(recordings, torch.randint(5, (80,), generator=g))
model = Activity().double()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
curriculum = Curriculum(total=10)
for epoch in range(2):
    for i, (x, y) in enumerate(DataLoader(data, batch_size=b), 1):
        x = x[:, : curriculum.length]
        (F.cross_entropy(model(x), y) / k).backward()
        if i % k == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        curriculum.step()
