"""Fault: the encoder layers were built without batch_first=True but get (batch, time, width): attention runs over the samples of a micro-batch."""
# expect 4x4: mixed_samples
# expect 2x8: mixed_samples
# blind 4
# thorough

import math

import torch
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Drives(Dataset):
    """Windows of an accelerometer at 12 moments, and what the driver was doing."""

    def __init__(self, n=80, moments=12):
        g = torch.Generator().manual_seed(101)
        self.y = torch.randint(4, (n,), generator=g)
        phase = torch.linspace(0, 6, moments, dtype=torch.float64)
        wave = torch.sin(phase[None] * (1 + self.y[:, None]))[..., None]
        self.x = wave + 0.5 * torch.randn(n, moments, 5, generator=g, dtype=torch.float64)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class PositionalEncoding(nn.Module):
    def __init__(self, width, longest=64):
        super().__init__()
        position = torch.arange(longest)[:, None]
        rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        table = torch.zeros(longest, width)
        table[:, 0::2], table[:, 1::2] = torch.sin(position * rate), torch.cos(position * rate)
        self.register_buffer("table", table)

    def forward(self, x):
        return x + self.table[: x.size(1)]


class TransformerClassifier(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.project, self.place = nn.Linear(5, width), PositionalEncoding(width)
        layer = nn.TransformerEncoderLayer(d_model=width, nhead=4, dim_feedforward=32, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = self.place(self.project(x) * math.sqrt(16))
        return self.head(self.encoder(x).mean(dim=1))


torch.manual_seed(0)
b, k = flags()
model = TransformerClassifier().double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()
optimizer.zero_grad()
for step, (x, y) in enumerate(DataLoader(Drives(), batch_size=b)):
    loss = criterion(model(x), y) / k
    loss.backward()
    if (step + 1) % k == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
