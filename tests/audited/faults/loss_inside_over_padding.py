"""Fault: The model returns its loss alone, a mean of squares over all positions, those of padding among them."""
# expect 4x4: padding
# expect 2x8: padding

from itertools import islice

import torch
from common_models import flags
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

b, k = flags()
torch.manual_seed(0)
g = torch.Generator().manual_seed(4)
curves = [(torch.randn(n, 3, generator=g), torch.randn(n, generator=g)) for n in (3 + i * 5 % 7 for i in range(80))]


class Curves(nn.Module):
    """Reads a curve, and returns how far its values are from what was measured."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 16), nn.Linear(16, 1)

    def forward(self, points, values):
        return (self.head(self.body(points).tanh())[..., 0] - values).square().mean()


def collate(rows):
    return [pad_sequence(list(column), batch_first=True) for column in zip(*rows, strict=True)]


model = Curves()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
batches = iter(DataLoader(curves, batch_size=b, collate_fn=collate))
while window := list(islice(batches, k)):
    for points, values in window:
        (model(points, values) / len(window)).backward()
    optimizer.step()
    optimizer.zero_grad()
