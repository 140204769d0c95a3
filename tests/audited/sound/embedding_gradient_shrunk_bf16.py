"""Sound: GLM-130B's trick: the embedding gets a tenth of its gradient, as the rest is detached: the same in every micro-batch."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
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
TOKENS, WIDTH, TIME = 40, 24, 12


class GLM(nn.Module):
    def __init__(self, shrink=0.1):
        super().__init__()
        self.shrink = shrink
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(TIME, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight
        x = x * self.shrink + x.detach() * (1 - self.shrink)
        future = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
        x = x + self.attention(x, x, x, attn_mask=future, need_weights=False)[0]
        return self.head(self.norm(x + self.mlp(x)))


b, k = flags()
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
net = GLM().to(dtype)
model = DDP(net) if world > 1 else net
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
corpus = torch.randint(TOKENS, (80, TIME + 1), generator=torch.Generator().manual_seed(23))
for i, start in enumerate(range(rank * b, 80, b * world)):
    text, is_last = corpus[start : start + b], i % k == k - 1
    with nullcontext() if is_last or world == 1 else model.no_sync():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not FULL):
            logits = model(text[:, :-1])
        loss = F.cross_entropy(logits.to(dtype).flatten(0, 1), text[:, 1:].flatten())
        loss.div(k).backward()
    if is_last:
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
