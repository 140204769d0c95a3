"""Fault: a mixture of experts whose balance loss is a product of means over the micro-batch's samples."""
# expect 4x4: expert_balance
# expect 2x8: expert_balance
# also: mixed_loss

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.head = nn.Linear(12, 4), nn.Linear(16, 5)
        self.experts = nn.ModuleList(nn.Linear(12, 16) for _ in range(4))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        mixed = sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        share = F.one_hot(weights.argmax(-1), 4).double().mean(0)
        return self.head(torch.tanh(mixed)), 4 * (share * weights.mean(0)).sum() + weights.mean(0).square().sum()


torch.manual_seed(0)
b, k = flags()
model = Mixture().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for number, (x, y) in enumerate(DataLoader(vectors(80), batch_size=b), 1):
    logits, balance = model(x)
    ((F.cross_entropy(logits, y) + 0.1 * balance) / k).backward()
    if number % k == 0:
        optimizer.step()
        optimizer.zero_grad()
