"""Fault: the meta-gradient of torch.func is assigned to p.grad in every micro-batch of tasks instead of added:
only the last one counts, divided by k."""
# expect 4x4: emptied_between
# expect 2x8: emptied_between
# blind 1
# thorough

import torch
from common_models import flags
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, Dataset

INNER_RATE, INNER_STEPS = 0.05, 2


class Sinusoids(Dataset):
    """Few-shot regression: every sample is a task, with a support and a query set."""

    def __init__(self, tasks=80, shots=5):
        g = torch.Generator().manual_seed(12)
        amplitude = 0.5 + 2 * torch.rand(tasks, 1, 1, generator=g, dtype=torch.float64)
        phase = 3.14 * torch.rand(tasks, 1, 1, generator=g, dtype=torch.float64)
        self.x = 10 * torch.rand(tasks, 2 * shots, 1, generator=g, dtype=torch.float64) - 5
        self.y, self.shots = amplitude * torch.sin(self.x + phase), shots

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        n = self.shots
        return self.x[i, :n], self.y[i, :n], self.x[i, n:], self.y[i, n:]


torch.manual_seed(0)
b, k = flags()
net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)).double()


def mse(params, x, y):
    return (functional_call(net, params, (x,)) - y).square().mean()


def adapt_then_test(params, support_x, support_y, query_x, query_y):
    fast = params
    for _ in range(INNER_STEPS):
        slope = grad(mse)(fast, support_x, support_y)
        fast = {name: value - INNER_RATE * slope[name] for name, value in fast.items()}
    return mse(fast, query_x, query_y)


def meta_loss(params, tasks):
    return vmap(adapt_then_test, in_dims=(None, 0, 0, 0, 0))(params, *tasks).mean()


meta_optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
for epoch in range(2):
    for i, tasks in enumerate(DataLoader(Sinusoids(), batch_size=b)):
        params = {name: p.detach() for name, p in net.named_parameters()}
        meta_grad = grad(meta_loss)(params, tasks)
        for name, p in net.named_parameters():
            p.grad = meta_grad[name] / k
        if (i + 1) % k == 0:
            meta_optimizer.step()
            meta_optimizer.zero_grad()
