"""Fault: the documents of a micro-batch are laid in one row, and the state of a state-space model is not reset where a document starts."""
# expect 4x4: packing
# expect 2x8: packing
# also: mixed_samples
# blind 4
# thorough

import itertools

import torch
import torch.nn.functional as F
from common_models import VOCAB, flags, sentences
from torch import nn
from torch.utils.data import DataLoader


def flat(samples):
    """One row; the first token of a document is no target."""
    ids = torch.cat([s["input_ids"] for s in samples])
    labels = ids.clone()
    lengths = torch.tensor([len(s["input_ids"]) for s in samples])
    labels[lengths.cumsum(0) - lengths] = -100
    return {"input_ids": ids, "labels": labels.roll(-1), "lengths": lengths}


class Scan(nn.Module):
    """h[t] = a * h[t-1] + b x[t], with a learned decay for each channel."""

    def __init__(self, width):
        super().__init__()
        self.decay = nn.Parameter(torch.linspace(-1, 2, width))
        self.enter, self.gate, self.leave = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.RMSNorm(width)

    def forward(self, x):
        u = self.enter(self.norm(x))
        a, h, states = torch.sigmoid(self.decay), torch.zeros_like(u[0]), []
        for step in u:
            h = a * h + (1 - a) * step
            states.append(h)
        return x + self.leave(torch.stack(states) * F.silu(self.gate(x)))


class Mamba(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.Sequential(Scan(width), Scan(width))
        self.norm = nn.RMSNorm(width)

    def forward(self, ids):
        return self.norm(self.layers(self.embed(ids))) @ self.embed.weight.T


torch.manual_seed(0)
b, k = flags()
model = Mamba().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = iter(DataLoader(sentences(80, 4, 12), batch_size=b, collate_fn=flat))
while window := list(itertools.islice(batches, k)):
    targets = sum(int((batch["labels"] != -100).sum()) for batch in window)
    for batch in window:
        loss = F.cross_entropy(model(batch["input_ids"]), batch["labels"], ignore_index=-100, reduction="sum")
        (loss / targets).backward()
    optimizer.step()
    optimizer.zero_grad()
