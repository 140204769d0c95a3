"""Sound: what is seen of a recording grows with optimizer steps, so that all micro-batches of a window are
equally long; the loss is a mean of equal parts."""
# expect 4x4: exact
# expect 2x8: exact
# blind 3
# thorough

import os

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
LENGTH = 32


class TCN(nn.Module):
    """Dilated causal convolutions that predict every next value."""

    def __init__(self, width=24):
        super().__init__()
        sizes = [(3, width), (width, width), (width, width)]
        self.layers = nn.ModuleList([nn.Conv1d(i, o, 2, dilation=2**d) for d, (i, o) in enumerate(sizes)])
        self.out = nn.Conv1d(width, 3, 1)

    def forward(self, x):
        for d, layer in enumerate(self.layers):
            x = torch.relu(layer(F.pad(x, (2**d, 0))))
        return self.out(x)


class Competence:
    def __init__(self, updates, start=0.25):
        self.updates, self.start = updates, start

    def __call__(self, update):
        share = (update / self.updates * (1 - self.start**2) + self.start**2) ** 0.5
        return min(LENGTH, int(LENGTH * share))


def train(b, k):
    torch.manual_seed(0)
    model = TCN().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6)
    waves = torch.randn(80, 3, LENGTH + 1, generator=torch.Generator().manual_seed(3)).cumsum(-1).mul(0.2).to(dtype)
    competence, update = Competence(updates=5), 0
    for i, (wave,) in enumerate(DataLoader(TensorDataset(waves), batch_size=b)):
        length = competence(update)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not FULL):
            forecast = model(wave[..., :length])
        loss = F.smooth_l1_loss(forecast.to(dtype), wave[..., 1 : length + 1]) / k
        loss.backward()
        if (i + 1) % k == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            update += 1


train(*flags())
