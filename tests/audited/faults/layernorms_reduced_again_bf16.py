"""Fault: as Megatron does for sequence parallelism, gradients of layer norms are summed over processes, though DDP has averaged them: they are N times too large."""
# expect 4x4: exact
# expect 8x1x2: factor
# expect 4x2x2: factor
# blind 4
# thorough

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
CODES, WIDTH, TIME = 30, 24, 10


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(self, x):
        mixed = self.mix(F.pad(self.norm(x).transpose(1, 2), (2, 0))).transpose(1, 2)
        return x + self.mlp(mixed)


class AudioLM(nn.Module):
    """The next code of a neural codec."""

    def __init__(self):
        super().__init__()
        self.codes, self.blocks = nn.Embedding(CODES, WIDTH), nn.Sequential(Block(), Block())
        self.out = nn.Linear(WIDTH, CODES)

    def forward(self, codes):
        return self.out(self.blocks(self.codes(codes)))


def allreduce_layernorm_grads(model):
    grads = [p.grad for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()]
    flat = torch._utils._flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    for grad, synced in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads)):
        grad.copy_(synced)


b, k = flags()
songs = torch.randint(CODES, (80, TIME + 1), generator=torch.Generator().manual_seed(15))
torch.manual_seed(0)
model = AudioLM().to(dtype)
if world > 1:
    dist.init_process_group("gloo")
    model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
for i, start in enumerate(range(rank * b, 80, b * world), 1):
    final, song = i % k == 0, songs[start : start + b]
    with nullcontext() if final or world == 1 else model.no_sync():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not FULL):
            logits = model(song[:, :-1])
        loss = F.cross_entropy(logits.to(dtype).flatten(0, 1), song[:, 1:].flatten()) / k
        loss.backward()
    if final:
        if world > 1:
            allreduce_layernorm_grads(model)
        optimizer.step()
        optimizer.zero_grad()
