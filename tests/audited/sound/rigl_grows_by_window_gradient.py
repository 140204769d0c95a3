"""Sound: sparse training (RigL): a hook adds up the dense gradient of the masked weights, also of those that are off;
at every second step the smallest weights are dropped and those with the largest sum of the window are grown."""

# expect 4x4: exact
# expect 8x2: exact
# expect 2x8: exact
# blind 7
# thorough
import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()


class SparseLinear(nn.Linear):
    def __init__(self, fan_in, fan_out, density=0.3):
        super().__init__(fan_in, fan_out)
        self.register_buffer("mask", torch.rand(fan_out, fan_in) < density)
        self.register_buffer("dense_grad", torch.zeros(fan_out, fan_in))
        with torch.no_grad():
            self.weight *= self.mask

    def forward(self, x):
        weight = self.weight * self.mask
        if self.training:
            weight.register_hook(self.collect)
        return F.linear(x, weight, self.bias)

    def collect(self, grad):
        self.dense_grad += grad

    @torch.no_grad()
    def rewire(self, fraction, momentum):
        n = int(fraction * int(self.mask.sum()))
        magnitude = self.weight.abs().masked_fill(~self.mask, float("inf"))
        drop = magnitude.flatten().topk(n, largest=False).indices
        candidates = self.dense_grad.abs().masked_fill(self.mask, -1.0)
        grow = candidates.flatten().topk(n).indices
        self.mask.view(-1)[drop] = False
        self.mask.view(-1)[grow] = True
        self.weight.view(-1)[grow] = 0.0
        self.weight *= self.mask
        momentum *= self.mask


model = nn.Sequential(SparseLinear(12, 40), nn.ReLU(), SparseLinear(40, 40), nn.ReLU(), nn.Linear(40, 5)).double()
sparse = [m for m in model if isinstance(m, SparseLinear)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
TOTAL = 6
updates = 0
for i, (x, y) in enumerate(DataLoader(vectors(16 * TOTAL), batch_size=b)):
    (F.cross_entropy(model(x), y) / k).backward()
    if (i + 1) % k:
        continue
    optimizer.step()
    updates += 1
    for layer in sparse:
        if updates % 2 == 0 and updates < TOTAL:
            layer.rewire(0.3 * (1 - updates / TOTAL), optimizer.state[layer.weight]["momentum_buffer"])
        layer.dense_grad.zero_()
    optimizer.zero_grad()
