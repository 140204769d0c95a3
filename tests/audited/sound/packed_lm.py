"""Exact: a language model with tied embeddings reads the documents of a micro-batch packed in one row, masked by document.
Each step's documents are sorted by length before they are cut; layers are checkpointed, reentrant or not by turns."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# expect 2x4x2: exact
# thorough
# blind

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, HEADS = 50, 16, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH))

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        x = x + self.out(attended.transpose(0, 1).flatten(1))
        return x + self.mlp(self.norm2(x))


class PackedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(24, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.1)

    def forward(self, documents):
        """Sum of the next-token losses."""
        ids = torch.cat(documents)
        owner = torch.cat([torch.full((len(d),), i) for i, d in enumerate(documents)])
        place = torch.cat([torch.arange(len(d)) for d in documents])
        mask = (owner[:, None] == owner) & torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        x = self.tokens(ids) + self.places(place)
        for i, layer in enumerate(self.layers):
            x = checkpoint(layer, x, mask, use_reentrant=i % 2 == 0)
        has_next = owner[:-1] == owner[1:]
        return F.cross_entropy(self.head(x[:-1][has_next]), ids[1:][has_next], reduction="sum")


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
gen = torch.Generator().manual_seed(17)
corpus = [torch.randint(VOCAB, (n,), generator=gen) for n in torch.randint(3, 24, (75,), generator=gen).tolist()]
torch.manual_seed(0)
model = PackedLM().double()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for start in range(0, len(corpus), b * k * world):
    step = sorted(corpus[start : start + b * k * world], key=len, reverse=True)
    num_targets = sum(len(document) - 1 for document in step)
    mine = step[rank::world]
    for j in range(0, len(mine), b):
        (model(mine[j : j + b]) / num_targets).backward()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
    optimizer.step()
    optimizer.zero_grad()

if world > 1:
    dist.barrier()
    dist.destroy_process_group()
