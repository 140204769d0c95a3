"""Sound: an update by the diagonal of the empirical Fisher matrix; per-sample gradients by torch.func, of which sums and sums of squares are added up over the window."""
# expect 4x4: exact
# expect 2x8: exact
# blind 5
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.out = nn.Linear(12, 20), nn.Linear(20, 20), nn.Linear(20, 5)

    def forward(self, x):
        return self.out(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))


torch.manual_seed(0)
b, k = flags()
model = Net().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)


def compute_loss(params, sample, target):
    return F.cross_entropy(functional_call(model, params, (sample[None],)), target[None])


per_sample = vmap(grad(compute_loss), in_dims=(None, 0, 0))


class Moments:
    def __init__(self):
        self.n = 0
        self.first = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        self.second = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def add(self, grads, n):
        self.n += n
        for name, g in grads.items():
            self.first[name] += g.sum(0)
            self.second[name] += g.square().sum(0)

    def preconditioned(self, damping=0.1):
        return {
            name: self.first[name] / self.n / ((self.second[name] / self.n).sqrt() + damping) for name in self.first
        }


loader = DataLoader(vectors(77), batch_size=b)
moments = Moments()
for i, (data, targets) in enumerate(loader, 1):
    params = {name: p.detach() for name, p in model.named_parameters()}
    moments.add(per_sample(params, data, targets), len(targets))
    if i % k == 0 or i == len(loader):
        for name, g in moments.preconditioned().items():
            model.get_parameter(name).grad = g
        optimizer.step()
        moments = Moments()
