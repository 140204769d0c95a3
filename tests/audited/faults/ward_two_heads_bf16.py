"""Fault: the last window has fewer micro-batches, and the auxiliary loss (only that one) is still divided by
the k of a full one."""
# expect 4x4: tail
# expect 2x8: tail
# expect 4x2x2: tail
# also: factor
# size: 0.038
# blind 2
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
per_device, accumulate = flags()
N, STEP, AUX = 72, 16, 0.01

g = torch.Generator().manual_seed(12)
codes = torch.randint(0, 40, (N, 10), generator=g)
diagnosis = torch.randint(0, 6, (N,), generator=g)
days = (3 + torch.randn(N, generator=g)).to(dtype)


class Ward(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.place = nn.Parameter(torch.zeros(10, width))
        layer = nn.TransformerEncoderLayer(width, 4, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.diagnosis, self.days = nn.Linear(width, 6), nn.Linear(width, 1)

    def forward(self, codes):
        hidden = self.encoder(self.embed(codes) + self.place).mean(1)
        return self.diagnosis(hidden), self.days(hidden).squeeze(-1)


torch.manual_seed(0)
model = Ward().to(dtype)
if world > 1:
    dist.init_process_group("gloo")
    model = DDP(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
starts = list(range(rank * per_device, N, per_device * world))
for i, start in enumerate(starts):
    rows = slice(start, start + per_device)
    last = (i + 1) % accumulate == 0 or i + 1 == len(starts)
    in_window = min(STEP, N - start // STEP * STEP)  # patients of this step, of all processes
    with contextlib.nullcontext() if world == 1 or last else model.no_sync():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not FULL):
            logits, stay = model(codes[rows])
            main = F.cross_entropy(logits, diagnosis[rows], reduction="sum") * world / in_window
            aux = F.mse_loss(stay.to(dtype), days[rows])
        (main + AUX * aux / accumulate).backward()
    if last:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
