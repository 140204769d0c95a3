"""Fault: the router's balance loss multiplies shares and probabilities of a micro-batch's tokens instead of the
step's."""
# expect 4x4: expert_balance
# expect 2x8: expert_balance
# expect 4x2x2: expert_balance
# thorough
# also: mixed_loss
# size: 0.01
# blind 2

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
g = torch.Generator().manual_seed(2)
tokens, wanted = torch.randn(80, 6, 16, generator=g).to(dtype), torch.randint(5, (80,), generator=g)


class Mixture(nn.Module):
    def __init__(self, experts=4):
        super().__init__()
        self.router = nn.Linear(16, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, 16, 32) * 0.2)
        self.down = nn.Parameter(torch.randn(experts, 32, 16) * 0.2)
        self.out = nn.Linear(16, 5)

    def forward(self, x):
        p = self.router(x).float().softmax(-1) if not FULL else self.router(x).softmax(-1)
        gate, chosen = p.max(-1)
        hidden = torch.relu(torch.einsum("btd,edh->bteh", x, self.up))
        each = torch.einsum("bteh,ehd->bted", hidden, self.down)
        one_hot = F.one_hot(chosen, p.shape[-1]).to(p)
        x = x + torch.einsum("bted,bte->btd", each.to(p), one_hot * gate[..., None])
        balance = p.shape[-1] * (one_hot.mean((0, 1)) * p.mean((0, 1))).sum()
        return self.out(x.mean(1)), balance


torch.manual_seed(0)
model = Mixture().to(dtype)
if world > 1:
    dist.init_process_group("gloo")
    model = DDP(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1, eps=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0, enabled=not FULL)
for i, start in enumerate(range(rank * b, 80, b * world), 1):
    with nullcontext() if world == 1 or i % k == 0 else model.no_sync():
        with torch.autocast("cpu", torch.float16, enabled=not FULL):
            logits, balance = model(tokens[start : start + b])
        loss = F.cross_entropy(logits.to(dtype), wanted[start : start + b]) + 0.06 * balance
        scaler.scale(loss / k).backward()
    if i % k == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
