"""Sound: gradients are gathered at the first process alone, which weighs them by samples, clips, and sends the result back to all: each of them steps by itself."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 4
# thorough

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.utils import parameters_to_vector

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SAMPLES, STEP = 77, 16


class TwoBranch(nn.Module):
    """A sales forecast from the last weeks and the shop; shops of the first kind have a branch of their own."""

    def __init__(self):
        super().__init__()
        self.shops = nn.Embedding(12, 6)
        self.common = nn.Sequential(nn.Linear(14, 20), nn.Softplus(), nn.Linear(20, 1))
        self.special = nn.Linear(14, 1)

    def forward(self, weeks, shop):
        x = torch.cat([weeks, self.shops(shop)], 1)
        y, own = self.common(x).squeeze(1), shop < 3
        return y.index_add(0, own.nonzero().flatten(), self.special(x[own]).squeeze(1))


class ParameterServer:
    def __init__(self, model, limit):
        self.parameters, self.limit = list(model.parameters()), limit

    def exchange(self, samples):
        """Every process brings the sum of its samples' gradients, and how many these were."""
        own = parameters_to_vector([p.grad for p in self.parameters])
        own = torch.cat([own, own.new_tensor([samples])])
        if world > 1:
            all_of_them = [torch.empty_like(own) for _ in range(world)] if rank == 0 else None
            dist.gather(own, all_of_them, dst=0)
            own = sum(all_of_them) if rank == 0 else own
        if rank == 0:
            own[:-1] /= own[-1]
            own[:-1] *= (self.limit / own[:-1].norm()).clamp(max=1)
        if world > 1:
            dist.broadcast(own, src=0)
        for p, part in zip(self.parameters, own[:-1].split([p.numel() for p in self.parameters])):
            p.grad.copy_(part.view_as(p))


g = torch.Generator().manual_seed(64)
weeks = torch.rand(SAMPLES, 8, generator=g, dtype=torch.float64) * 3
shop, sold = torch.randint(12, (SAMPLES,), generator=g), torch.poisson(weeks.mean(1), generator=g)

torch.manual_seed(0)
b, k = flags()
if world > 1:
    dist.init_process_group("gloo")
model = TwoBranch().double()
server = ParameterServer(model, limit=0.5)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02, eps=1e-6)
for step in torch.arange(SAMPLES).split(STEP):
    optimizer.zero_grad(set_to_none=False)
    for p in server.parameters:
        p.grad = torch.zeros_like(p)
    samples = 0
    for rows in step[rank::world].split(b):
        F.poisson_nll_loss(model(weeks[rows], shop[rows]), sold[rows], reduction="sum").backward()
        samples += len(rows)
    server.exchange(samples)
    optimizer.step()
