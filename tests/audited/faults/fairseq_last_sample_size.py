"""Fault: the summed gradient of the window is divided by the number of tokens of its last micro-batch only (of
all processes)."""
# expect 4x4: factor
# expect 2x8: factor
# expect 8x1x2: exact
# expect 4x2x2: factor
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

PAD, VOCAB = 1, 32
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Translation(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.source, self.target = (
            nn.EmbeddingBag(VOCAB, dim, padding_idx=PAD),
            nn.Embedding(VOCAB, dim, padding_idx=PAD),
        )
        self.decoder, self.out = nn.GRU(dim, dim, batch_first=True), nn.Linear(dim, VOCAB)

    def forward(self, source, previous):
        hidden, _ = self.decoder(self.target(previous), torch.tanh(self.source(source))[None])
        return self.out(hidden)


def criterion(model, sample):
    """As in fairseq: the sum of the losses, and the number it is to be divided by."""
    logits = model(sample["source"], sample["target"][:, :-1])
    gold = sample["target"][:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), gold.flatten(), ignore_index=PAD, reduction="sum")
    return loss, (gold != PAD).sum()


class Trainer:
    def __init__(self, model):
        self.model = DistributedDataParallel(model) if world > 1 else model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def train_step(self, samples):
        self.optimizer.zero_grad()
        for i, sample in enumerate(samples):
            last = i == len(samples) - 1
            with contextlib.nullcontext() if last or world == 1 else self.model.no_sync():
                loss, sample_size = criterion(self.model, sample)
                loss.backward()
        if world > 1:
            dist.all_reduce(sample_size)
        for p in self.model.parameters():
            p.grad.mul_(world / sample_size)
        self.optimizer.step()


if world > 1:
    dist.init_process_group("gloo")
b, k = flags()
g = torch.Generator().manual_seed(8)
pairs = [
    {
        name: torch.randint(2, VOCAB, (int(torch.randint(4, 14, (), generator=g)),), generator=g)
        for name in ("source", "target")
    }
    for _ in range(80)
]
batches = [
    {name: pad_sequence([p[name] for p in pairs[i : i + b]], True, PAD) for name in ("source", "target")}
    for i in range(rank * b, 80, b * world)
]
torch.manual_seed(0)
trainer = Trainer(Translation().double())
for i in range(0, len(batches), k):
    trainer.train_step(batches[i : i + k])
