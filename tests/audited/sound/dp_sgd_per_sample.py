"""Sound: DP-SGD clips the gradient of every sample (vmap of grad), adds the sums by hand, draws its noise once
per step from a generator seeded by the step, and always divides by the expected 16."""
# expect 4x4: exact
# expect 2x8: exact
# blind 1
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader

CLIP, NOISE, EXPECTED_BATCH = 0.5, 0.3, 16


class PrivateSGD:
    def __init__(self, model, lr):
        self.model, self.steps = model, 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def loss_of_one(self, params, x, y):
        return F.cross_entropy(functional_call(self.model, params, (x[None],)), y[None])

    def add(self, x, y):
        params = {name: p.detach() for name, p in self.model.named_parameters()}
        per_sample = vmap(grad(self.loss_of_one), in_dims=(None, 0, 0))(params, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in per_sample.values()]).norm(dim=0)
        factors = (CLIP / (norms + 1e-6)).clamp(max=1.0)
        for name, g in per_sample.items():
            self.sums[name] += torch.einsum("n,n...->...", factors, g)

    def step(self):
        generator = torch.Generator().manual_seed(1000 + self.steps)
        for name, p in self.model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype) * NOISE * CLIP
            p.grad = (self.sums[name] + noise) / EXPECTED_BATCH
            self.sums[name].zero_()
        self.optimizer.step()
        self.steps += 1


torch.manual_seed(0)
b, k = flags()
private = PrivateSGD(nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5)).double(), lr=0.2)
for epoch in range(2):
    loader = DataLoader(vectors(77), batch_size=b)
    for i, (x, y) in enumerate(loader, 1):
        private.add(x, y)
        if i % k == 0 or i == len(loader):
            private.step()
