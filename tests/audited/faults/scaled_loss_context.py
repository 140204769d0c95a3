"""Fault: leaving the context that scales the loss divides all gradients by the scale, those of the earlier micro-batches again (apex's delay_unscale is missing)."""
# expect 4x4: changed_between
# expect 2x8: changed_between
# blind 4

import contextlib

import torch
from common_models import flags
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset


class Amp:
    """What remains of apex.amp: the loss is scaled, and gradients are brought back when the context ends."""

    def __init__(self, optimizer, scale=8.0, growth_interval=1000):
        self.optimizer, self.scale, self.growth_interval = optimizer, scale, growth_interval
        self.good = 0

    def gradients(self):
        return [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]

    @contextlib.contextmanager
    def scale_loss(self, loss):
        yield loss * self.scale
        self.overflow = any(not bool(grad.isfinite().all()) for grad in self.gradients())
        for grad in self.gradients():
            grad.div_(self.scale)

    def step(self):
        if not self.overflow:
            self.optimizer.step()
            self.good += 1
        if self.overflow or self.good == self.growth_interval:
            self.scale *= 0.5 if self.overflow else 2.0
            self.good = 0


g = torch.Generator().manual_seed(3)
wind = torch.randn(80, 24, generator=g, dtype=torch.float64).cumsum(1) / 5
data = TensorDataset(wind[:, None, :20], wind[:, 20:])

torch.manual_seed(0)
b, k = flags()
model = nn.Sequential(
    nn.Conv1d(1, 8, 3, dilation=1),
    nn.GELU(),
    nn.Conv1d(8, 8, 3, dilation=2),
    nn.GELU(),
    nn.Flatten(),
    nn.Linear(112, 4),
).double()
amp = Amp(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
for number, (past, future) in enumerate(DataLoader(data, batch_size=b), 1):
    loss = mse_loss(model(past), future) / k
    with amp.scale_loss(loss) as scaled:
        scaled.backward()
    if number % k == 0:
        amp.step()
        amp.optimizer.zero_grad()
