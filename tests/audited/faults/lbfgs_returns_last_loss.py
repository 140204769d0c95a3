"""Fault: the closure of L-BFGS adds up the right gradient over the micro-batches but returns the loss of the
last one only, which the strong-Wolfe line search then takes for the objective."""
# expect 4x4: update
# expect 2x8: update
# blind 1
# thorough

from itertools import islice

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
g = torch.Generator().manual_seed(17)
x = torch.randn(80, 10, generator=g, dtype=torch.float64)
teacher = torch.randn(10, 4, generator=g, dtype=torch.float64)
data = torch.utils.data.TensorDataset(x, torch.sin(x @ teacher) + 0.3 * torch.randn(80, 4, generator=g))

surrogate = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)).double()
optimizer = torch.optim.LBFGS(surrogate.parameters(), lr=1.0, max_iter=4, history_size=5, line_search_fn="strong_wolfe")


def windows(loader, size):
    batches = iter(loader)
    while window := list(islice(batches, size)):
        yield window


for epoch in range(2):
    for window in windows(DataLoader(data, batch_size=b), k):

        def closure():
            optimizer.zero_grad()
            for inputs, wanted in window:
                loss = F.mse_loss(surrogate(inputs), wanted)
                (loss / len(window)).backward()
            return loss

        optimizer.step(closure)
