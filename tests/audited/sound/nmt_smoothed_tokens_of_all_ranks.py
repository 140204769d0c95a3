"""A translation model with label smoothing over real tokens; a window is read ahead, its tokens are counted on all processes, and the
sums are divided by that number (times N, since DDP averages). One process may have more padding than another."""
# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: exact
# expect 2x4x2: exact
# thorough
# blind 6

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence

PAD, BOS, EOS, WORDS = 0, 1, 2, 30
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Translator(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, d, padding_idx=PAD), nn.Embedding(24, d)
        self.core = nn.Transformer(d, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def embed(self, ids):
        return self.words(ids) * self.words.embedding_dim**0.5 + self.places.weight[: ids.shape[1]]

    def forward(self, src, prev):
        causal = torch.ones(prev.shape[1], prev.shape[1], dtype=torch.bool).triu(1)
        hidden = self.core(
            self.embed(src),
            self.embed(prev),
            tgt_mask=causal,
            src_key_padding_mask=src == PAD,
            tgt_key_padding_mask=prev == PAD,
            memory_key_padding_mask=src == PAD,
        )
        return hidden @ self.words.weight.T


def smoothed(logits, gold, eps=0.1):
    lprobs = logits.log_softmax(-1)
    nll, smooth = -lprobs.gather(-1, gold[..., None]).squeeze(-1), -lprobs.sum(-1)
    real = gold != PAD
    return ((1 - eps - eps / (WORDS - 1)) * nll + eps / (WORDS - 1) * smooth)[real].sum()


def batch(pairs):
    def pad(rows):
        return pad_sequence([torch.tensor(r) for r in rows], batch_first=True, padding_value=PAD)

    return pad([s for s, _ in pairs]), pad([[BOS, *t] for _, t in pairs]), pad([[*t, EOS] for _, t in pairs])


def corpus(n):
    g = torch.Generator().manual_seed(21)

    def draw():
        return torch.randint(3, WORDS, (int(torch.randint(2, 20, (), generator=g)),), generator=g).tolist()

    return [(draw(), draw()) for _ in range(n)]


torch.manual_seed(0)
b, k = flags()
model = Translator().double()
if world > 1:
    dist.init_process_group("gloo")
    model = DDP(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.98), eps=1e-9)
noam = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) ** -0.5, (s + 1) * 3**-1.5))
pairs = corpus(80)[rank::world]
for start in range(0, len(pairs), b * k):
    window = [batch(pairs[i : i + b]) for i in range(start, start + b * k, b)]
    tokens = torch.tensor(sum(int((gold != PAD).sum()) for _, _, gold in window))
    if world > 1:
        dist.all_reduce(tokens)
    for j, (src, prev, gold) in enumerate(window, 1):
        with nullcontext() if world == 1 or j == k else model.no_sync():
            (smoothed(model(src, prev), gold) * world / tokens).backward()
    optimizer.step()
    noam.step()
    optimizer.zero_grad()
