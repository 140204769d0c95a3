"""Sound: experts balanced without a loss: a routing bias moves once per optimizer step, by the tokens counted
over the window and all processes."""
# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: exact
# expect 8x1x2: exact
# blind 1
# thorough

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel

b, k = flags()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)


class MoE(nn.Module):
    def __init__(self, dim=12, experts=4):
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, dim, 24) / 4)
        self.down = nn.Parameter(torch.randn(experts, 24, dim) / 5)
        self.register_buffer("bias", torch.zeros(experts))
        self.load = torch.zeros(experts)  # not a buffer: DDP would overwrite it with that of the first process

    def forward(self, x):
        affinity = self.router(x).sigmoid()
        chosen = (affinity + self.bias).topk(2, dim=-1).indices
        mask = F.one_hot(chosen, len(self.bias)).sum(-2)
        if self.training:
            self.load += mask.flatten(0, -2).sum(0)
        gates = F.normalize(affinity * mask, p=1, dim=-1)
        return x + torch.einsum("beth,ehd,bte->btd", torch.einsum("btd,edh->beth", x, self.up).tanh(), self.down, gates)

    @torch.no_grad()
    def rebalance(self, speed=0.02):
        if world > 1:
            dist.all_reduce(self.load)
        self.bias += speed * torch.sign(self.load.sum() / len(self.load) - self.load)
        self.load.zero_()


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.moe, self.head = nn.Embedding(30, 12), MoE(), nn.Linear(12, 30)

    def forward(self, ids):
        return self.head(self.moe(self.embed(ids)))


lm = LM().double()
model = DistributedDataParallel(lm) if world > 1 else lm
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
text = torch.randint(30, (80, 11), generator=torch.Generator().manual_seed(41))
for window in text.view(-1, world, k, b, 11)[:, rank]:
    for micro, ids in enumerate(window, 1):
        if world > 1:
            model.require_backward_grad_sync = micro == k
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        (loss / k).backward()
    optimizer.step()
    optimizer.zero_grad()
    lm.moe.rebalance()
