"""Sound: a Bayesian network adds its KL, divided by the number of micro-batches of an epoch, at every micro-batch: in sum it enters a step by the same share."""
# expect 4x4: exact
# expect 2x8: exact
# blind 4
# thorough

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class BayesLinear(nn.Module):
    """A Gaussian for each weight; what comes out is the mean and the variance, in closed form."""

    def __init__(self, i, o, prior=0.5):
        super().__init__()
        self.mean = nn.Parameter(torch.randn(o, i) / i**0.5)
        self.rho = nn.Parameter(torch.full((o, i), -3.0))
        self.bias, self.prior = nn.Parameter(torch.zeros(o)), prior

    def forward(self, x, variance=None):
        sigma2 = F.softplus(self.rho) ** 2
        out = F.linear(x**2, sigma2)
        if variance is not None:
            out = out + F.linear(variance, sigma2 + self.mean**2)
        return F.linear(x, self.mean, self.bias), out

    def kl(self):
        sigma = F.softplus(self.rho)
        return ((sigma**2 + self.mean**2) / (2 * self.prior**2) - 0.5 + (self.prior / sigma).log()).sum()


class BayesNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([BayesLinear(10, 20), BayesLinear(20, 1)])

    def forward(self, x):
        mean, variance = self.layers[0](x)
        slope = 1 - torch.tanh(mean) ** 2
        return self.layers[1](torch.tanh(mean), slope**2 * variance)

    def kl(self):
        return sum(layer.kl() for layer in self.layers)


g = torch.Generator().manual_seed(12)
x = torch.randn(80, 10, generator=g, dtype=torch.float64)
y = x[:, :1].sin() + 0.3 * x[:, 1:2] * x[:, 2:3] + 0.1 * torch.randn(80, 1, generator=g, dtype=torch.float64)
torch.manual_seed(0)
b, k = flags()
loader = DataLoader(TensorDataset(x, y), batch_size=b)
model = BayesNet().double()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(2):
    for i, (inputs, targets) in enumerate(loader, 1):
        mean, variance = model(inputs)
        nll = F.gaussian_nll_loss(mean, targets, variance + 0.01)
        loss = nll / k + 0.01 * model.kl() / len(loader)
        loss.backward()
        if i % k == 0:
            optimizer.step()
            optimizer.zero_grad()
