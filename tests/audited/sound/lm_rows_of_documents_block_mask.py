"""Rows of several documents: a word sees only its own document, positions start anew, the first word of a document is no
target, and the loss is divided by the targets of the whole window, counted before it is computed."""

# expect 4x4: exact
# expect 2x8: exact
# thorough
# blind 6
import itertools

import torch
import torch.nn.functional as F
from common_models import VOCAB, flags, sentences
from torch import nn
from torch.utils.data import DataLoader

LENGTH = 32


def rows(n=80):
    """Documents are put into n rows one after the other; what no longer fits opens the next row (no cuts)."""
    out, row = [], []
    for s in itertools.cycle(sentences(97, low=3, high=14)):
        if sum(map(len, row)) + len(s["input_ids"]) > LENGTH:
            out.append(row)
            row = []
            if len(out) == n:
                return out
        row.append(s["input_ids"])


def collate(batch):
    ids = torch.zeros(len(batch), LENGTH, dtype=torch.long)
    doc, pos = torch.full_like(ids, -1), torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for r, row in enumerate(batch):
        at = 0
        for d, words in enumerate(row):
            n = len(words)
            ids[r, at : at + n], doc[r, at : at + n], pos[r, at : at + n] = words, d, torch.arange(n)
            labels[r, at : at + n - 1] = words[1:]
            at += n
    return ids, doc, pos, labels


class Decoder(nn.Module):
    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.heads = heads
        self.tok, self.pos = nn.Embedding(VOCAB, dim), nn.Embedding(LENGTH, dim)
        self.n1, self.n2, self.n3 = (nn.LayerNorm(dim) for _ in range(3))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim))

    def forward(self, ids, doc, pos):
        x = self.tok(ids) + self.pos(pos)
        B, T, D = x.shape
        q, k, v = self.qkv(self.n1(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        see = (doc[:, :, None] == doc[:, None, :]) & torch.ones(T, T, dtype=torch.bool).tril()
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=see[:, None])
        x = x + self.out(a.transpose(1, 2).reshape(B, T, D))
        x = x + self.ff(self.n2(x))
        return self.n3(x) @ self.tok.weight.t()


def main():
    b, k = flags()
    torch.manual_seed(0)
    model = Decoder().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    stream = iter(DataLoader(rows(), batch_size=b, collate_fn=collate))
    while window := list(itertools.islice(stream, k)):
        targets = sum(int((labels != -100).sum()) for *_, labels in window)
        for ids, doc, pos, labels in window:
            logits = model(ids, doc, pos)
            (F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


main()
