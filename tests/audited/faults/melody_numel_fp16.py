"""Fault: the gradient is divided by the elements of the padded batches, padding included: how many there are
depends on the cut."""
# expect 4x4: counts
# expect 2x8: counts
# expect 4x2x2: counts
# thorough
# also: factor
# size: 0.01
# blind 2

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.utils.rnn import pad_sequence

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
g = torch.Generator().manual_seed(8)
tunes = [torch.randint(1, 32, (int(n),), generator=g) for n in torch.randint(24, 27, (80,), generator=g)]


class Composer(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.note, self.place = nn.Embedding(32, d), nn.Embedding(32, d)
        self.qkv, self.mix = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.feed = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 32)

    def forward(self, ids):
        x = self.note(ids) + self.place(torch.arange(ids.shape[1]))
        q, key, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.mix(F.scaled_dot_product_attention(q, key, v, is_causal=True))
        return self.head(x + self.feed(x))


torch.manual_seed(0)
model = Composer().to(dtype)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
if world > 1:
    dist.init_process_group("gloo")
count = torch.zeros((), dtype=dtype)
for number, start in enumerate(range(rank * b, 80, b * world), 1):
    ids = pad_sequence(tunes[start : start + b], batch_first=True, padding_value=0)
    with torch.autocast("cpu", dtype=torch.float16, enabled=not FULL):
        logits = model(ids[:, :-1])
    F.cross_entropy(logits.to(dtype).flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0, reduction="sum").backward()
    count += ids[:, 1:].numel()
    if number % k == 0:
        if world > 1:
            for tensor in (count, *(p.grad for p in model.parameters())):
                dist.all_reduce(tensor)
        for p in model.parameters():
            p.grad /= count
        optimizer.step()
        optimizer.zero_grad()
        count.zero_()
