"""Sound: five members are trained at once with vmap over stacked weights; torch.func's gradients are added up
by hand and given to the optimizer."""
# expect 4x4: exact
# expect 2x8: exact
# blind 3
# thorough

import copy

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.utils.data import DataLoader

MEMBERS = 5


def member():
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5)).double()


torch.manual_seed(0)
b, k = flags()
models = [member() for _ in range(MEMBERS)]
base = copy.deepcopy(models[0]).to("meta")
params, buffers = stack_module_state(models)
params = {name: nn.Parameter(p.detach()) for name, p in params.items()}
optimizer = torch.optim.Adam(params.values(), lr=5e-3)


def loss_of_one(params, buffers, x, y, weight):
    logits = functional_call(base, (params, buffers), (x,))
    return (F.cross_entropy(logits, y, reduction="none") * weight).sum()


gradients = vmap(grad_and_value(loss_of_one), in_dims=(0, 0, None, None, 0))

data = vectors(77)
# bagging: each member weighs each sample by a draw of its own, made once
bags = torch.poisson(torch.ones(MEMBERS, 77, dtype=torch.float64), generator=torch.Generator().manual_seed(2))
indexed = [(i, x, y) for i, (x, y) in enumerate(data)]
loader = DataLoader(indexed, batch_size=b)
total = {name: torch.zeros_like(p) for name, p in params.items()}
for number, (index, x, y) in enumerate(loader, 1):
    first = (number - 1) // k * 16
    weight = bags[:, index] / bags[:, first : first + 16].sum(1, keepdim=True)  # of the member's own bag of this step
    values = {name: p.detach() for name, p in params.items()}
    own, losses = gradients(values, buffers, x, y, weight)
    for name in total:
        total[name] += own[name]
    if number % k == 0 or number == len(loader):
        for name, p in params.items():
            p.grad = total[name].clone()
            total[name].zero_()
        optimizer.step()
