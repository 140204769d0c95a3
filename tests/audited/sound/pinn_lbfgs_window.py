"""Sound: a PINN of a damped oscillator is trained by L-BFGS whose closure goes over all micro-batches of the
window, adds the initial conditions once, and returns the whole loss to the line search."""
# expect 4x4: exact
# expect 2x8: exact
# blind 1
# thorough

import torch
from common_models import flags
from torch import nn
from torch.func import grad, vmap
from torch.utils.data import DataLoader

DAMPING, STIFFNESS = 0.4, 4.0

torch.manual_seed(0)
b, k = flags()
net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def u(t):
    return net(t.view(1, 1)).squeeze()


velocity = grad(u)
acceleration = grad(velocity)


def residual(times):
    def at(t):
        return acceleration(t) + DAMPING * velocity(t) + STIFFNESS * u(t)

    return vmap(at)(times)


def initial_conditions():
    zero = torch.zeros((), dtype=torch.float64)
    return (u(zero) - 1).square() + velocity(zero).square()


optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=3, history_size=4, line_search_fn="strong_wolfe")
times = 2 * torch.rand(80, generator=torch.Generator().manual_seed(53), dtype=torch.float64)


def fit(window):
    n = sum(map(len, window))

    def closure():
        optimizer.zero_grad()
        loss = 5 * initial_conditions()
        loss.backward()
        total = loss.detach()
        for batch in window:
            loss = residual(batch).square().sum() / n
            loss.backward()
            total = total + loss.detach()
        return total

    return optimizer.step(closure)


window = []
for batch in DataLoader(times, batch_size=b):
    window.append(batch)
    if len(window) == k:
        fit(window)
        window = []
