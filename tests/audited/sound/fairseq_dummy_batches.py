"""Sound: sums are computed backward, tokens are counted over window and processes, and a process without
samples takes a dummy batch times 0."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 3
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

PAD, VOCAB, N = 1, 32, 70
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Summarizer(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.source, self.target = (
            nn.EmbeddingBag(VOCAB, dim, padding_idx=PAD),
            nn.Embedding(VOCAB, dim, padding_idx=PAD),
        )
        self.decoder, self.out = nn.LSTM(dim, dim, batch_first=True), nn.Linear(dim, VOCAB)

    def forward(self, source, previous):
        start = torch.tanh(self.source(source))[None]
        hidden, _ = self.decoder(self.target(previous), (start, torch.zeros_like(start)))
        return self.out(hidden)


def criterion(model, sample):
    gold = sample["target"][:, 1:]
    logits = model(sample["source"], sample["target"][:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), gold.flatten(), ignore_index=PAD, reduction="sum")
    return loss, int((gold != PAD).sum())


class Trainer:
    def __init__(self, model, dummy):
        self.model = DistributedDataParallel(model) if world > 1 else model
        self.optimizer, self.dummy = torch.optim.Adam(model.parameters(), lr=5e-3), dummy

    def train_step(self, samples):
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for i, sample in enumerate(samples):
            last = i == len(samples) - 1
            with contextlib.nullcontext() if last or world == 1 else self.model.no_sync():
                loss, sample_size = criterion(self.model, self.dummy if sample is None else sample)
                if sample is None:
                    loss, sample_size = loss * 0, 0
                loss.backward()
            total += sample_size
        if world > 1:
            dist.all_reduce(total)
        for p in self.model.parameters():
            p.grad.mul_(world / total)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()


if world > 1:
    dist.init_process_group("gloo")
b, k = flags()
g = torch.Generator().manual_seed(18)
pairs = [
    {
        name: torch.randint(2, VOCAB, (int(torch.randint(4, 14, (), generator=g)),), generator=g)
        for name in ("source", "target")
    }
    for _ in range(N)
]


def batch(rows):
    return {name: pad_sequence([p[name] for p in rows], True, PAD) for name in ("source", "target")} if rows else None


torch.manual_seed(0)
trainer = Trainer(Summarizer().double(), batch(pairs[:2]))
for first in range(0, N, 16):
    update = pairs[first : first + 16]
    starts = [(micro * world + rank) * b for micro in range(k)]
    trainer.train_step([batch(update[s : s + b]) for s in starts])
