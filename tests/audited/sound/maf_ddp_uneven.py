"""Sound: a masked autoregressive flow whose forward is the negative log likelihood, so that DDP sees it; 77
samples, divided by those of the step."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 3
# thorough

import contextlib
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DIM, HIDDEN = 5, 20
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class MaskedLinear(nn.Linear):
    def __init__(self, ins, outs, strict):
        super().__init__(len(ins), len(outs))
        mask = outs[:, None] > ins[None] if strict else outs[:, None] >= ins[None]
        self.register_buffer("mask", mask.double())

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)


class MADE(nn.Module):
    def __init__(self):
        super().__init__()
        order, hidden = torch.arange(DIM), torch.arange(HIDDEN) % (DIM - 1)
        self.first = MaskedLinear(order, hidden, strict=False)
        self.mean, self.log_std = (MaskedLinear(hidden, order, strict=True) for _ in range(2))

    def forward(self, x):
        h = torch.relu(self.first(x))
        log_std = torch.tanh(self.log_std(h))
        return (x - self.mean(h)) * (-log_std).exp(), -log_std.sum(1)


class MAF(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.layers = nn.ModuleList([MADE() for _ in range(depth)])

    def forward(self, x):
        total = 0
        for layer in self.layers:
            x, log_det = layer(x)
            x, total = x.flip(1), total + log_det
        return (0.5 * x.pow(2).sum(1) + 0.5 * DIM * math.log(2 * math.pi) - total).sum()


def main():
    b, k = flags()
    if world > 1:
        dist.init_process_group("gloo")
    noise = torch.randn(77, DIM, generator=torch.Generator().manual_seed(16), dtype=torch.float64)
    data = noise.cumsum(1).sin() + 0.2 * noise
    torch.manual_seed(0)
    model = MAF().double()
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    for start in range(0, 77, 16):
        batch = data[start : start + 16]
        chunks = batch[rank::world].split(b)
        for i, chunk in enumerate(chunks):
            last = i + 1 == len(chunks)
            with contextlib.nullcontext() if last or world == 1 else model.no_sync():
                (model(chunk) * world / len(batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        optimizer.zero_grad()


main()
