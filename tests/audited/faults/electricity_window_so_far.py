"""Fault: at every micro-batch the loss of all forecasts of the window so far is computed backward: earlier
micro-batches count again with each later one."""
# expect 4x4: counted_again
# expect 2x8: counted_again
# blind 3
# thorough

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Load(Dataset):
    """Sliding windows over an hourly series: 24 hours in, 6 out."""

    def __init__(self, n=80, history=24, horizon=6):
        t = torch.arange(n + history + horizon, dtype=torch.float64)
        noise = torch.randn(len(t), generator=torch.Generator().manual_seed(6), dtype=torch.float64)
        self.series = torch.sin(t * 2 * torch.pi / 24) + 0.02 * t + 0.3 * noise
        self.n, self.history, self.horizon = n, history, horizon

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        middle = i + self.history
        return self.series[i:middle], self.series[middle : middle + self.horizon]


class DLinear(nn.Module):
    """Trend and remainder, each with a layer of its own."""

    def __init__(self, history=24, horizon=6, kernel=5):
        super().__init__()
        self.kernel = kernel
        self.trend, self.rest = nn.Linear(history, horizon), nn.Linear(history, horizon)

    def forward(self, x):
        padded = F.pad(x[:, None], (self.kernel // 2,) * 2, mode="replicate")
        trend = F.avg_pool1d(padded, self.kernel, stride=1)[:, 0]
        return self.trend(trend) + self.rest(x - trend)


torch.manual_seed(0)
b, k = flags()
model = DLinear().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
forecasts, truths = [], []
for i, (x, y) in enumerate(DataLoader(Load(), batch_size=b)):
    forecasts.append(model(x))
    truths.append(y)
    loss = F.mse_loss(torch.cat(forecasts), torch.cat(truths))
    (loss / k).backward(retain_graph=True)
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
        forecasts, truths = [], []
