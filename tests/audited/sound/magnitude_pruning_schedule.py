"""Sound: weights are pruned by magnitude on a schedule of optimizer steps; masks are buffers, change only after a step, and multiply weight and gradient."""
# expect 4x4: exact
# expect 2x8: exact
# blind 5
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader


class Mask(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.register_buffer("mask", torch.ones_like(weight))

    def forward(self, weight):
        return weight * self.mask


class GradualPruning:
    """Zhu & Gupta: sparsity rises with the cube from `begin` to `end`, in optimizer steps."""

    def __init__(self, model, final, begin, end):
        self.layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
        for layer in self.layers:
            parametrize.register_parametrization(layer, "weight", Mask(layer.weight.detach()))
        self.final, self.begin, self.end, self.steps = final, begin, end, 0

    @torch.no_grad()
    def step(self):
        self.steps += 1
        done = min(max((self.steps - self.begin) / (self.end - self.begin), 0.0), 1.0)
        sparsity = self.final * (1 - (1 - done) ** 3)
        for layer in self.layers:
            dense = layer.parametrizations.weight.original
            dropped = int(sparsity * dense.numel())
            mask = layer.parametrizations.weight[0].mask
            mask.fill_(1.0).view(-1)[dense.abs().flatten().argsort()[:dropped]] = 0.0


class TabularNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.input, self.block, self.output = nn.Linear(12, 32), nn.Linear(32, 32), nn.Linear(32, 5)
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        x = F.silu(self.input(x))
        return self.output(x + F.silu(self.block(self.norm(x))))


def main():
    b, k = flags()
    torch.manual_seed(0)
    model = TabularNet().double()
    pruning = GradualPruning(model, final=0.7, begin=2, end=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.02, eps=1e-5)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)
    loader = DataLoader(vectors(77), batch_size=b)
    for _ in range(2):
        seen = 0
        for i, (x, y) in enumerate(loader, 1):
            F.cross_entropy(model(x), y, reduction="sum").backward()
            seen += len(y)
            if i % k == 0 or i == len(loader):
                for p in model.parameters():
                    p.grad.div_(seen)
                optimizer.step()
                scheduler.step()
                pruning.step()
                optimizer.zero_grad()
                seen = 0


main()
