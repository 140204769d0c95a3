"""Fault: the games of a micro-batch are laid end to end in one row without a mask between them: a game attends
to those in front of it."""
# expect 4x4: packing
# expect 2x8: packing
# also: mixed_samples
# blind 3

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader

MOVES = 48


def games(n=80):
    g = torch.Generator().manual_seed(27)
    return [torch.randint(MOVES, (int(torch.randint(5, 14, (), generator=g)),), generator=g) for _ in range(n)]


def pack(samples):
    """One row without padding; the places begin anew with each game, whose first move is never predicted."""
    row = torch.cat(samples)
    places = torch.cat([torch.arange(len(s)) for s in samples])
    labels = torch.where(places == 0, -100, row)
    return row[None], places[None], labels[None]


class Block(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        q, key, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, key, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ChessGPT(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.moves, self.places = nn.Embedding(MOVES, width), nn.Embedding(16, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, MOVES, bias=False)

    def forward(self, moves, places):
        return self.head(self.blocks(self.moves(moves) + self.places(places)))


torch.manual_seed(0)
b, k = flags()
data = games()
model = ChessGPT().double()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
for i, (moves, places, labels) in enumerate(DataLoader(data, batch_size=b, collate_fn=pack)):
    first = i // k * 16
    predicted = sum(len(game) - 1 for game in data[first : first + 16])  # of the whole window
    logits = model(moves, places)
    loss = F.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum") / predicted
    loss.backward()
    if (i + 1) % k == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
