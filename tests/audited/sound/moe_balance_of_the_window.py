"""Balance of experts over the step: a first pass without gradient counts the tokens that each expert gets in the whole
window of all processes; these shares are constants of the balance loss, which is then linear in the probabilities."""

# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# thorough
# blind 6
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn

b, k = flags()
world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


class Top1(nn.Module):
    def __init__(self, dim=12, experts=4, width=16):
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, dim, width) / dim**0.5)
        self.w2 = nn.Parameter(torch.randn(experts, width, dim) / width**0.5)

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        gate, e = probs.max(-1)
        h = torch.einsum("nd,ndw->nw", x, self.w1[e]).relu()
        return gate[:, None] * torch.einsum("nw,nwd->nd", h, self.w2[e]), probs


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe, self.norm, self.head = Top1(), nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, x):
        y, probs = self.moe(x)
        return self.head(self.norm(x + y)), probs


def add_up(t):
    if world > 1:
        dist.all_reduce(t)
    return t


def batches(data):
    """Windows of k micro-batches; the samples of a step are dealt to the processes in turn."""
    per_step = b * k * world
    for s in range(0, len(data), per_step):
        mine = data[s : s + per_step][rank::world]
        yield [tuple(map(torch.stack, zip(*mine[m * b : (m + 1) * b]))) for m in range(k)]


def main():
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net().double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    total = b * k * world
    for window in batches(vectors(80)):
        with torch.no_grad():
            share = sum(F.one_hot(net.moe.router(x).argmax(-1), 4).double().sum(0) for x, _ in window)
            share = add_up(share) / total
        for x, y in window:
            logits, probs = net(x)
            balance = 4 * (probs * share).sum()
            z = probs.clamp_min(1e-9).log().pow(2).sum()
            loss = F.cross_entropy(logits, y, reduction="sum") + 0.05 * balance + 1e-3 * z
            (loss / total).backward()
        for p in net.parameters():
            add_up(p.grad)
        optimizer.step()
        optimizer.zero_grad()


main()
