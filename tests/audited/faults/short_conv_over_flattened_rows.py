"""Fault: the documents of a micro-batch are flattened into one row (padding-free); attention keeps them apart, but the short
causal convolution in front of it runs over the borders, so a document sees the end of the one before it."""

# expect 4x4: packing
# expect 2x8: packing
# expect 4x2x2: packing
# blind 7
# thorough
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import VOCAB, flags, sentences
from torch import nn


def flatten(samples):
    ids = torch.cat([s["input_ids"] for s in samples])
    labels = torch.cat([F.pad(s["input_ids"][1:], (0, 1), value=-100) for s in samples])
    lengths = torch.tensor([len(s["input_ids"]) for s in samples])
    positions = torch.cat([torch.arange(n) for n in lengths])
    segments = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    return {"ids": ids[None], "labels": labels[None], "positions": positions[None], "segments": segments[None]}


class HybridBlock(nn.Module):
    def __init__(self, dim=16, heads=2, kernel=4):
        super().__init__()
        self.heads, self.kernel = heads, kernel
        self.conv = nn.Conv1d(dim, dim, kernel, groups=dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, segments):
        u = self.norm(x).transpose(1, 2)
        u = F.silu(self.conv(F.pad(u, (self.kernel - 1, 0)))).transpose(1, 2)
        q, key, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(u).chunk(3, -1))
        n = x.size(1)
        mask = (segments[:, :, None] == segments[:, None, :]) & torch.ones(n, n, dtype=torch.bool).tril()
        a = F.scaled_dot_product_attention(q, key, v, attn_mask=mask[:, None])
        return x + self.out(a.transpose(1, 2).flatten(2))


class HybridLM(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, dim), nn.Embedding(32, dim)
        self.blocks = nn.ModuleList(HybridBlock(dim) for _ in range(2))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids, positions, segments):
        x = self.tok(ids) + self.pos(positions)
        for block in self.blocks:
            x = block(x, segments)
        return self.head(x)


b, k = flags()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = HybridLM().double()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
data = sentences(80)[rank::world]
for start in range(0, len(data), b * k):
    window = [flatten(data[j : j + b]) for j in range(start, start + b * k, b)]
    tokens = sum((m["labels"] != -100).sum() for m in window)
    if world > 1:
        dist.all_reduce(tokens)
    for m in window:
        logits = model(m["ids"], m["positions"], m["segments"])
        (F.cross_entropy(logits[0], m["labels"][0], reduction="sum") / tokens).backward()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()
