"""Sound: prompts and answers of a micro-batch in one padding-free row; attention per segment (cu_seqlens), the short convolution
masked where it would reach over a border, no target across borders, and the loss over the answer tokens of the window."""

# expect 4x4: exact
# expect 2x8: exact
# expect 8x2: exact
# blind 7
# thorough
import itertools

import torch
import torch.nn.functional as F
from common_models import VOCAB, flags, sentences
from torch import nn


def flattening_collator(samples):
    ids, labels, positions, cu_seqlens = [], [], [], [0]
    for s in samples:
        tokens, prompt = s["input_ids"], len(s["input_ids"]) // 3
        target = torch.roll(tokens, -1)
        target[-1] = -100
        target[: max(prompt - 1, 0)] = -100
        ids.append(tokens)
        labels.append(target)
        positions.append(torch.arange(len(tokens)))
        cu_seqlens.append(cu_seqlens[-1] + len(tokens))
    return torch.cat(ids), torch.cat(labels), torch.cat(positions), cu_seqlens


def varlen_attention(q, k, v, cu_seqlens):
    out = []
    for start, end in itertools.pairwise(cu_seqlens):
        part = (t[start:end].transpose(0, 1) for t in (q, k, v))
        out.append(F.scaled_dot_product_attention(*part, is_causal=True).transpose(0, 1))
    return torch.cat(out)


class Block(nn.Module):
    def __init__(self, dim=16, heads=2, kernel=3):
        super().__init__()
        self.heads, self.taps = heads, nn.Parameter(torch.randn(kernel, dim) / kernel)
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, positions, cu_seqlens):
        u = self.norm(x)
        shifted = [u]
        for lag in range(1, len(self.taps)):
            past = torch.roll(u, lag, 0)
            shifted.append(past.masked_fill((positions < lag)[:, None], 0.0))
        u = F.silu(sum(tap * s for tap, s in zip(self.taps, shifted)))
        q, k, v = self.qkv(u).unflatten(-1, (3, self.heads, -1)).unbind(1)
        return x + self.out(varlen_attention(q, k, v, cu_seqlens).flatten(1))


class PaddingFreeLM(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, dim), nn.Embedding(32, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))

    def forward(self, ids, positions, cu_seqlens):
        x = self.tok(ids) + self.pos(positions)
        for block in self.blocks:
            x = block(x, positions, cu_seqlens)
        return F.linear(x, self.tok.weight)  # tied


torch.manual_seed(0)
b, k = flags()
model = PaddingFreeLM().double()
optimizer = torch.optim.RAdam(model.parameters(), lr=5e-3)
data = sentences(80)
batches = [flattening_collator(data[i : i + b]) for i in range(0, len(data), b)]
for start in range(0, len(batches), k):
    window = batches[start : start + k]
    answers = sum(int((labels != -100).sum()) for _, labels, _, _ in window)
    for ids, labels, positions, cu_seqlens in window:
        F.cross_entropy(model(ids, positions, cu_seqlens), labels, reduction="sum").div(answers).backward()
    optimizer.step()
    optimizer.zero_grad()
