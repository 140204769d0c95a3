"""Sound: quantisation-aware training with learned step sizes (LSQ): the gradient scale depends on the layer's size alone,
activations are quantised by a scale per sample, and the bit width falls with the optimizer's steps."""

# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: exact
# blind 7
# thorough
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

torch.manual_seed(0)
b, k = flags()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")


def round_pass(x):
    return (x.round() - x).detach() + x


def grad_scale(x, scale):
    return (x - x * scale).detach() + x * scale


class LSQLinear(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.bits = 8
        self.step_size = nn.Parameter(2 * self.weight.detach().abs().mean() / 127**0.5)

    def quantised_weight(self):
        q = 2 ** (self.bits - 1) - 1
        s = grad_scale(self.step_size, 1.0 / (self.weight.numel() * q) ** 0.5)
        return round_pass((self.weight / s).clamp(-q - 1, q)) * s

    def quantised_activation(self, x):
        scale = x.detach().abs().amax(dim=-1, keepdim=True).clamp(min=1e-8) / 127  # of this row only
        return round_pass(x / scale) * scale

    def forward(self, x):
        return F.linear(self.quantised_activation(x), self.quantised_weight(), self.bias)


net = nn.Sequential(LSQLinear(12, 32), nn.ReLU(), LSQLinear(32, 32), nn.ReLU(), LSQLinear(32, 5)).double()
model = DistributedDataParallel(net) if world > 1 else net
weights = [p for n, p in net.named_parameters() if "step_size" not in n]
steps = [p for n, p in net.named_parameters() if "step_size" in n]
optimizer = torch.optim.SGD(
    [{"params": weights}, {"params": steps, "lr": 1e-3, "weight_decay": 0.0}], lr=0.1, weight_decay=1e-4
)

data = vectors(96)
loader = DataLoader(data, batch_size=b, sampler=DistributedSampler(data, world, rank, shuffle=True, seed=3))
updates = 0
for i, (x, y) in enumerate(loader):
    boundary = (i + 1) % k == 0
    for layer in net:
        if isinstance(layer, LSQLinear):
            layer.bits = max(4, 8 - updates)
    with nullcontext() if boundary or world == 1 else model.no_sync():
        (F.cross_entropy(model(x), y) / k).backward()
    if boundary:
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
