"""Fault: the gradients that torch.autograd.grad returns are added to buffers in bfloat16, to save memory: every sum is
rounded to 8 bits."""

# expect 4x4: low_precision
# expect 2x8: low_precision
# blind 7
# thorough
import torch
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
b, k = flags()
LOOKBACK, HORIZON = 20, 5


class Load(Dataset):
    def __init__(self, n=96):
        g = torch.Generator().manual_seed(1)
        t = torch.arange(n + LOOKBACK + HORIZON, dtype=torch.float64)
        self.series = torch.sin(t / 4) + 0.3 * torch.randn(t.shape, generator=g, dtype=torch.float64)
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.series[i : i + LOOKBACK], self.series[i + LOOKBACK : i + LOOKBACK + HORIZON]


class Block(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(LOOKBACK, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.backcast, self.forecast = nn.Linear(width, LOOKBACK), nn.Linear(width, HORIZON)

    def forward(self, x):
        h = self.body(x)
        return x - self.backcast(h), self.forecast(h)


class NBeats(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x):
        total = 0
        for block in self.blocks:
            x, forecast = block(x)
            total = total + forecast
        return total


model = NBeats().double()
# the backcast of the last block is never used
params = [p for n, p in model.named_parameters() if not n.startswith("blocks.1.backcast")]
optimizer = torch.optim.SGD(params, lr=0.1)
buffers = [torch.zeros_like(p, dtype=torch.bfloat16) for p in params]
for i, (x, y) in enumerate(DataLoader(Load(), batch_size=b)):
    loss = (model(x) - y).abs().mean() / k
    for buffer, grad in zip(buffers, torch.autograd.grad(loss, params)):
        buffer += grad.to(torch.bfloat16)
    if (i + 1) % k == 0:
        for p, buffer in zip(params, buffers):
            p.grad = buffer.to(p.dtype)
            buffer.zero_()
        optimizer.step()
