"""Fault: OneCycleLR gets epochs * len(loader) as its number of steps, but is stepped once per optimizer step:
with k > 1 it is cut off."""
# expect 4x4: learning_rate
# expect 2x8: learning_rate
# blind 1
# thorough

import torch
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, Dataset

b, k = flags()
torch.manual_seed(0)


class Windows(Dataset):
    """Sliding windows of a series: 24 hours in, 6 out."""

    def __init__(self, n=80):
        t = torch.arange(n + 30, dtype=torch.float64)
        g = torch.Generator().manual_seed(6)
        noise = torch.randn(n + 30, generator=g, dtype=torch.float64)
        self.series = torch.sin(t / 4) + 0.3 * torch.sin(t / 1.7) + 0.2 * noise
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.series[i : i + 24], self.series[i + 24 : i + 30]


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.trend = nn.Linear(24, 6)
        self.season = nn.Sequential(nn.Conv1d(1, 4, 5, padding=2), nn.GELU(), nn.Flatten(), nn.Linear(96, 6))

    def forward(self, x):
        smooth = nn.functional.avg_pool1d(x.unsqueeze(1), 5, stride=1, padding=2).squeeze(1)
        return self.trend(smooth) + self.season((x - smooth).unsqueeze(1))


epochs = 2
model = Forecaster().double()
loader = DataLoader(Windows(), batch_size=b)
optimizer = torch.optim.AdamW(
    [{"params": model.trend.parameters()}, {"params": model.season.parameters()}], lr=1e-3, weight_decay=0.01
)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.01], total_steps=epochs * len(loader))
loss_fn = nn.HuberLoss()
for epoch in range(epochs):
    for step, (past, future) in enumerate(loader, 1):
        (loss_fn(model(past), future) / k).backward()
        if step % k == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
