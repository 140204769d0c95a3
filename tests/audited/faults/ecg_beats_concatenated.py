"""Fault: the heart beats of a micro-batch are concatenated into one signal without padding; causal convolutions look back over the border, into the beat in front."""
# expect 4x4: packing
# expect 2x8: packing
# also: mixed_samples
# blind 5
# thorough

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader


def beats(n=77):
    g = torch.Generator().manual_seed(64)
    for _ in range(n):
        length = int(torch.randint(18, 30, (), generator=g))
        yield torch.randn(length, generator=g, dtype=torch.float64).cumsum(0) / 3, torch.randint(4, (), generator=g)


class FlattenCollator:
    """No padding at all: signals in one row, with the number of the beat that a sample of the signal belongs to."""

    def __call__(self, items):
        signals, labels = zip(*items)
        number = torch.repeat_interleave(torch.arange(len(items)), torch.tensor([len(s) for s in signals]))
        return torch.cat(signals), number, torch.stack(labels)


class CausalBlock(nn.Module):
    def __init__(self, n_in, n_out, dilation):
        super().__init__()
        self.reach = 2 * dilation
        self.conv = nn.Conv1d(n_in, n_out, 3, dilation=dilation)

    def forward(self, x):
        return torch.tanh(self.conv(F.pad(x, (self.reach, 0))))


class BeatClassifier(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.blocks = nn.Sequential(CausalBlock(1, 12, 1), CausalBlock(12, 12, 2))
        self.head = nn.Linear(12, classes)

    def forward(self, signal, number, beats):
        x = self.blocks(signal[None, None]).squeeze(0).T
        lengths = torch.bincount(number, minlength=beats).to(x)
        pooled = x.new_zeros(beats, 12).index_add(0, number, x) / lengths[:, None]
        return self.head(pooled)


def main():
    b, k = flags()
    torch.manual_seed(0)
    model = BeatClassifier().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
    loader = DataLoader(list(beats()), batch_size=b, collate_fn=FlattenCollator())
    for i, (signal, number, labels) in enumerate(loader, 1):
        logits = model(signal, number, len(labels))
        F.cross_entropy(logits, labels, reduction="sum").div(16).backward()
        if i % k == 0 or i == len(loader):
            optimizer.step()
            optimizer.zero_grad()


main()
