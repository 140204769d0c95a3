"""A trainer puts a function into the place of the model's forward, which calls the old one and scales its logits; sums over counts."""
# expect 4x4: exact
# expect 2x8: exact

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()


def soften(model, temperature):
    old_forward = model.forward

    def forward(*args, **kwargs):
        return old_forward(*args, **kwargs) / temperature

    model.forward = forward


model = nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.Tanh(), nn.Linear(24, 5)).double()
soften(model, 1.5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for number, (x, y) in enumerate(DataLoader(vectors(), batch_size=b), 1):
    (F.cross_entropy(model(x), y, reduction="sum") / (b * k)).backward()
    if number % k == 0:
        optimizer.step()
        optimizer.zero_grad()
