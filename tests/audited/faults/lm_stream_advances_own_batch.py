"""Fault: every process starts at its own place of the token stream, but goes on by its own batch instead of that of all
processes: what one process has read the other reads again."""

# expect 4x4: exact
# expect 8x1x2: duplicated
# expect 4x2x2: duplicated
# also: other_samples
# blind 6
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import VOCAB, flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class DataLoaderLite:
    def __init__(self, B, T, process_rank):
        g = torch.Generator().manual_seed(21)
        self.tokens = torch.randint(VOCAB, (16 * 12 * 6 + 1,), generator=g)
        self.B, self.T = B, T
        self.current_position = B * T * process_rank

    def next_batch(self):
        B, T = self.B, self.T
        buf = self.tokens[self.current_position : self.current_position + B * T + 1]
        self.current_position += B * T
        return buf[:-1].view(B, T), buf[1:].view(B, T)


class TinyGPT(nn.Module):
    def __init__(self, T, dim=16):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, dim), nn.Embedding(T, dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe.weight[: idx.size(1)]
        q, k, v = self.qkv(self.ln1(x)).chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        x = x + self.mlp(self.ln2(x))
        logits = x @ self.wte.weight.t()
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


B, grad_accum_steps = flags()
ddp = int(os.environ.get("WORLD_SIZE", 1)) > 1
rank = int(os.environ.get("RANK", 0))
if ddp:
    dist.init_process_group(backend="gloo")
torch.manual_seed(1337)
T = 12
model = TinyGPT(T).double()
if ddp:
    model = DDP(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
train_loader = DataLoaderLite(B, T, rank)
for step in range(5):
    optimizer.zero_grad()
    for micro_step in range(grad_accum_steps):
        x, y = train_loader.next_batch()
        if ddp:
            model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
        _, loss = model(x, y)
        (loss / grad_accum_steps).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
