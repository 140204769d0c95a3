"""Sound: Bayes by backprop; the Kullback-Leibler term is added whole at every micro-batch, divided by len(loader), which has k times as many: the same share per step."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 5
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class BayesianLinear(nn.Module):
    def __init__(self, n_in, n_out, prior=0.5):
        super().__init__()
        self.mu = nn.Parameter(torch.randn(n_out, n_in) / n_in**0.5)
        self.rho = nn.Parameter(torch.full((n_out, n_in), -3.0))
        self.bias, self.prior = nn.Parameter(torch.zeros(n_out)), prior

    def resample(self, generator):
        self.epsilon = torch.randn(self.mu.shape, generator=generator).to(self.mu)

    def forward(self, x):
        return F.linear(x, self.mu + F.softplus(self.rho) * self.epsilon, self.bias)

    def kl(self):
        sigma = F.softplus(self.rho)
        return (self.prior / sigma).log().sum() + ((sigma**2 + self.mu**2) / (2 * self.prior**2) - 0.5).sum()


class BayesianClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([BayesianLinear(12, 20), BayesianLinear(20, 5)])

    def forward(self, x, y):
        logits = self.layers[1](torch.tanh(self.layers[0](x)))
        return F.cross_entropy(logits, y, reduction="sum"), sum(layer.kl() for layer in self.layers)


b, k = flags()
torch.manual_seed(0)
net = BayesianClassifier().double()
model = net
if world > 1:
    dist.init_process_group("gloo")
    model = DDP(net)
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3, eps=1e-5)
data = vectors(80)
loader = DataLoader(data, batch_size=b, sampler=DistributedSampler(data, world, rank, shuffle=False))
generator = torch.Generator().manual_seed(3)  # alike in all processes: one draw of the weights per step
for i, (x, y) in enumerate(loader):
    if i % k == 0:
        for layer in net.layers:
            layer.resample(generator)
    last = (i + 1) % k == 0
    with contextlib.nullcontext() if last or world == 1 else model.no_sync():
        nll, kl = model(x, y)
        loss = nll * world / 16 + 0.01 * kl / len(loader)
        loss.backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
