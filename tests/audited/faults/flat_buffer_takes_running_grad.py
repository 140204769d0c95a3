"""Fault: after every backward .grad is added to a flat buffer of the window, but .grad itself is emptied only after the step: earlier micro-batches count again with every later one."""
# expect 4x4: counted_again
# expect 2x8: counted_again
# also: factor
# blind 5

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn


class GradientBuffer:
    """Contiguous storage of all gradients (for one fused update)."""

    def __init__(self, module):
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.data = torch.zeros(sum(p.numel() for p in self.params), dtype=torch.float64)

    def accumulate(self):
        offset = 0
        for p in self.params:
            if p.grad is not None:
                self.data[offset : offset + p.numel()].add_(p.grad.reshape(-1))
            offset += p.numel()

    def write_back(self, scale=1.0):
        for p, part in zip(self.params, self.data.split([p.numel() for p in self.params])):
            p.grad = (part * scale).view_as(p).clone()

    def reset(self):
        self.data.zero_()
        for p in self.params:
            p.grad = None


class TemporalForecaster(nn.Module):
    def __init__(self, horizon=4):
        super().__init__()
        self.mix_time, self.mix_series = nn.Linear(12, 12), nn.Linear(3, 3)
        self.out = nn.Linear(12, horizon)

    def forward(self, history):  # batch, 12, 3
        x = history.transpose(1, 2)
        x = x + F.relu(self.mix_time(x))
        x = x.transpose(1, 2)
        x = x + F.relu(self.mix_series(x))
        return self.out(x.transpose(1, 2))


def main():
    b, k = flags()
    g = torch.Generator().manual_seed(66)
    series = torch.randn(80, 16, 3, generator=g, dtype=torch.float64).cumsum(1)
    torch.manual_seed(0)
    model = TemporalForecaster().double()
    buffer = GradientBuffer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(5):
        buffer.reset()
        for micro in range(k):
            window = series[step * 16 + micro * b : step * 16 + (micro + 1) * b]
            forecast = model(window[:, :12])
            F.l1_loss(forecast, window[:, 12:].transpose(1, 2)).backward()
            buffer.accumulate()
        buffer.write_back(scale=1 / k)
        optimizer.step()


main()
