"""Fault: the mean of the labelled samples of a micro-batch that has none is 0/0: the gradient of the whole
window is not a number."""
# expect 4x4: not_finite
# expect 2x8: not_finite
# expect 8x2: mean_of_means
# blind 3
# also: mean_of_means

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

UNLABELLED = -100


class Ladder(nn.Module):
    """A classifier that must also give its input back; most samples have no label."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(14, 20), nn.Tanh())
        self.decoder, self.classifier = nn.Linear(20, 14), nn.Linear(20, 4)

    def forward(self, x):
        hidden = self.encoder(x)
        return self.classifier(hidden), self.decoder(hidden)


g = torch.Generator().manual_seed(61)
cells = torch.randn(80, 14, generator=g, dtype=torch.float64)
types = torch.randint(4, (80,), generator=g)
types[torch.rand(80, generator=g) < 0.7] = UNLABELLED
types[::8] = torch.arange(10) % 4  # an expert looked at every eighth

torch.manual_seed(0)
b, k = flags()
model = Ladder().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(DataLoader(TensorDataset(cells, types), batch_size=b)):
    logits, again = model(x)
    known = (y != UNLABELLED).double()
    losses = F.cross_entropy(logits, y.clamp(min=0), reduction="none")
    supervised = (losses * known).sum() / known.sum()
    loss = supervised + 0.5 * F.mse_loss(again, x)
    (loss / k).backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
