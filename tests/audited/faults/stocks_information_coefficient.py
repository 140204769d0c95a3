"""Fault: the loss is the correlation of forecasts and returns within a micro-batch, averaged over those of the window (of one sample it is 0/0)."""
# expect 4x4: mixed_loss
# expect 2x8: mixed_loss
# expect 1x16: not_finite
# blind 4
# thorough

import numpy as np
import pandas as pd
import torch
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def market(days=5, stocks=16, factors=8):
    rng = np.random.default_rng(7)
    frame = pd.DataFrame(rng.standard_normal((days * stocks, factors)), columns=[f"f{i}" for i in range(factors)])
    frame["day"] = np.repeat(np.arange(days), stocks)
    frame["ret"] = 0.3 * frame.f0 - 0.2 * frame.f1 * frame.f2 + rng.standard_normal(len(frame))
    ranked = frame.groupby("day").rank(pct=True) - 0.5
    names = [c for c in ranked.columns if c.startswith("f")]
    return TensorDataset(torch.tensor(ranked[names].to_numpy()), torch.tensor(ranked["ret"].to_numpy()))


class Alpha(nn.Module):
    def __init__(self, factors=8, width=24):
        super().__init__()
        self.gate = nn.Linear(factors, factors)
        self.net = nn.Sequential(nn.Linear(factors, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, x):
        return self.net(x * torch.sigmoid(self.gate(x))).squeeze(-1)


def information_coefficient(forecast, returns):
    forecast, returns = forecast - forecast.mean(), returns - returns.mean()
    return (forecast * returns).sum() / (forecast.norm() * returns.norm())


torch.manual_seed(0)
b, k = flags()
model = Alpha().double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
history = []
for step, (x, ret) in enumerate(DataLoader(market(), batch_size=b, shuffle=False), 1):
    ic = information_coefficient(model(x), ret)
    loss = (1 - ic) / k
    loss.backward()
    history.append(ic.item())
    if step % k == 0:
        optimizer.step()
        optimizer.zero_grad()
