"""Fault: a hook clamps the gradient of recurrent states; on N processes (DDP takes the mean afterwards) they are N times as large there, so that more are clamped."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: gradient_hooks
# expect 4x2x2: gradient_hooks
# also: changed_between, not_a_sum
# blind 4
# thorough

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
STROKES, LIMIT = 10, 5.5e-3


class Writer(nn.Module):
    """Graves' network, with one layer: where the pen goes next, and whether it is lifted."""

    def __init__(self, width=32):
        super().__init__()
        self.enter, self.recur, self.leave = (
            nn.Linear(3, width),
            nn.Linear(width, width, bias=False),
            nn.Linear(width, 3),
        )

    def forward(self, strokes):
        h, outs = strokes.new_zeros(len(strokes), self.recur.in_features), []
        for stroke in strokes.unbind(1):
            h = torch.tanh(self.enter(stroke) + self.recur(h))
            if h.requires_grad:
                h.register_hook(lambda grad: grad.clamp(-LIMIT, LIMIT))
            outs.append(self.leave(h))
        return torch.stack(outs, 1)


g = torch.Generator().manual_seed(8)
pen = torch.randn(80, STROKES + 1, 2, generator=g).cumsum(1).mul(0.3)
lifted = (torch.rand(80, STROKES + 1, 1, generator=g) < 0.2).float()
lines = torch.cat([pen, lifted], -1).to(dtype)
data = TensorDataset(lines[:, :-1], lines[:, 1:])

torch.manual_seed(0)
model = Writer().to(dtype)
if world > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
loader = DataLoader(data, batch_size=b, sampler=DistributedSampler(data, world, rank, shuffle=False))
for i, (now, after) in enumerate(loader, 1):
    with nullcontext() if world == 1 or i % k == 0 else model.no_sync():
        with torch.autocast("cpu", torch.bfloat16, enabled=not FULL):
            out = model(now)
        out = out.to(dtype)
        loss = nn.functional.mse_loss(out[..., :2], after[..., :2])
        loss = loss + nn.functional.binary_cross_entropy_with_logits(out[..., 2], after[..., 2])
        (loss / k).backward()
    if i % k == 0:
        optimizer.step()
        optimizer.zero_grad()
