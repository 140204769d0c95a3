"""Fault: every process divides by the target tokens of its own window, and the processes' gradients are averaged: a mean of the
processes' means, though they have different numbers of tokens."""
# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: mean_of_means
# expect 2x4x2: mean_of_means
# thorough
# blind 6

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.utils.rnn import pad_sequence

PAD, BOS, EOS, WORDS = 0, 1, 2, 40
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")


def corpus(n):
    g = torch.Generator().manual_seed(4)
    for _ in range(n):
        s, t = (int(torch.randint(3, 14, (), generator=g)) for _ in range(2))
        yield torch.randint(3, WORDS, (s,), generator=g), torch.randint(3, WORDS, (t,), generator=g)


class Seq2Seq(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.src, self.tgt = nn.Embedding(WORDS, d, PAD), nn.Embedding(WORDS, d, PAD)
        self.query, self.decoder = nn.Linear(d, d), nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(2 * d, WORDS)

    def forward(self, src, prev):
        memory = self.src(src)
        h, _ = self.decoder(self.tgt(prev))
        scores = self.query(h) @ memory.transpose(1, 2)
        attn = scores.masked_fill((src == PAD)[:, None], float("-inf")).softmax(-1)
        return self.out(torch.cat([h, attn @ memory], -1))


def batchify(pairs):
    bos, eos = torch.tensor([BOS]), torch.tensor([EOS])
    src = pad_sequence([s for s, _ in pairs], batch_first=True)
    prev = pad_sequence([torch.cat([bos, t]) for _, t in pairs], batch_first=True)
    gold = pad_sequence([torch.cat([t, eos]) for _, t in pairs], batch_first=True)
    return src, prev, gold


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world


torch.manual_seed(0)
b, k = flags()
model = Seq2Seq().double()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.98), eps=1e-9)
pairs = list(corpus(96))
for start in range(0, len(pairs), b * k * world):
    mine = pairs[start + rank : start + b * k * world : world]
    window = [batchify(mine[i : i + b]) for i in range(0, len(mine), b)]
    ntokens = sum(int((gold != PAD).sum()) for *_, gold in window)
    optimizer.zero_grad()
    for src, prev, gold in window:
        logits = model(src, prev)
        nll = F.cross_entropy(logits.flatten(0, 1), gold.flatten(), ignore_index=PAD, reduction="sum")
        (nll / ntokens).backward()
    if world > 1:
        average_gradients(model)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
