"""Fault: CTC losses are divided by the letters of each micro-batch and then by k: letters of terse micro-
batches weigh more."""
# expect 4x4: mean_of_means
# expect 2x8: mean_of_means
# expect 4x2x2: mean_of_means
# size: 0.016
# blind 2
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()

g = torch.Generator().manual_seed(3)
sounds = torch.randn(80, 8, 40, generator=g).to(dtype)
texts = [torch.randint(1, 9, (int(torch.randint(9, 15, (), generator=g)),), generator=g) for _ in range(80)]


class Acoustic(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Conv1d(8, 24, 5, padding=2)
        self.norm = nn.GroupNorm(4, 24)
        self.deep = nn.Conv1d(24, 24, 5, padding=2)
        self.letters = nn.Linear(24, 9)

    def forward(self, x):
        x = F.gelu(self.norm(self.front(x)))
        return self.letters((x + F.gelu(self.deep(x))).transpose(1, 2))


torch.manual_seed(0)
model = Acoustic().to(dtype)
if world > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for number, start in enumerate(range(rank * b, 80, b * world), 1):
    window_ends = number % k == 0
    batch = range(start, min(start + b, 80))
    lengths = torch.tensor([len(texts[i]) for i in batch])
    with contextlib.nullcontext() if window_ends or world == 1 else model.no_sync():
        with torch.autocast("cpu", torch.bfloat16, enabled=not FULL):
            logits = model(sounds[start : start + b])
        log_p = logits.to(dtype).log_softmax(-1).transpose(0, 1)
        frames = torch.full((len(batch),), 40)
        per_text = F.ctc_loss(log_p, torch.cat([texts[i] for i in batch]), frames, lengths, reduction="none")
        (per_text.sum() / lengths.sum() / k).backward()
    if window_ends:
        optimizer.step()
        optimizer.zero_grad()
