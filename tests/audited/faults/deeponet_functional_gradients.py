"""Fault: torch.func.grad of the mean loss is added up over the micro-batches and handed to the optimizer without a
division by their number: the gradient is k times too large."""

# expect 4x4: factor
# expect 2x8: factor
# blind 7
# thorough
# open
import torch
from common_models import flags
from torch import nn
from torch.func import functional_call, grad_and_value
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
b, k = flags()
SENSORS, POINTS = 20, 8

# antiderivative operator: u -> int_0^y u
g = torch.Generator().manual_seed(1)
coefficients = torch.randn(64, 4, generator=g, dtype=torch.float64)
xs = torch.linspace(0, 1, SENSORS, dtype=torch.float64)
ys = torch.rand(64, POINTS, generator=g, dtype=torch.float64)
n = torch.arange(1, 5, dtype=torch.float64)
u = (coefficients[:, None] * torch.cos(n * xs[:, None])).sum(-1)
s = (coefficients[:, None] * torch.sin(n * ys[..., None]) / n).sum(-1)


class DeepONet(nn.Module):
    def __init__(self, width=32, basis=10):
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(SENSORS, width), nn.Tanh(), nn.Linear(width, basis))
        self.trunk = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, basis), nn.Tanh())
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, u, y):
        return torch.einsum("bi,bpi->bp", self.branch(u), self.trunk(y[..., None])) + self.bias


model = DeepONet().double()
params = dict(model.named_parameters())
optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)


def loss_fn(params, u, y, s):
    return (functional_call(model, params, (u, y)) - s).square().mean()


value_and_grad = grad_and_value(loss_fn)
loader = DataLoader(TensorDataset(u, ys, s), batch_size=b)
accumulated, running = None, 0.0
for i, batch in enumerate(loader, 1):
    grads, loss = value_and_grad({n: p.detach() for n, p in params.items()}, *batch)
    accumulated = grads if accumulated is None else {n: accumulated[n] + grads[n] for n in grads}
    running += loss.item()
    if i % k == 0:
        for name, p in params.items():
            p.grad = accumulated[name]
        optimizer.step()
        accumulated, running = None, 0.0
