"""Fault: the masked sum of the mel loss is divided by the number of frames of the window, but that number is taken
from the padded shapes: it depends on how the clips are cut into micro-batches."""

# expect 4x4: counts
# expect 2x8: counts
# also: padding
# blind 7
# thorough
# open
from itertools import islice

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
MELS = 5


def clips(n=80):
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(5, 30, (n,), generator=g)
    speakers = torch.randint(4, (n,), generator=g)
    return [(torch.randn(int(t), MELS, generator=g, dtype=torch.float64), s) for t, s in zip(lengths, speakers)]


def collate(samples):
    mel = pad_sequence([m for m, _ in samples], batch_first=True)
    return mel, torch.tensor([len(m) for m, _ in samples]), torch.stack([s for _, s in samples])


class Decoder(nn.Module):
    """Teacher forcing: frame t from the frames before t and the speaker."""

    def __init__(self, dim=24):
        super().__init__()
        self.prenet = nn.Linear(MELS, dim)
        self.speaker = nn.Embedding(4, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.mel = nn.Linear(dim, MELS)

    def forward(self, mel, speaker):
        before = F.pad(mel, (0, 0, 1, 0))[:, :-1]
        h = torch.relu(self.prenet(before)) + self.speaker(speaker)[:, None]
        return self.mel(self.rnn(h)[0])


def windows(loader):
    batches = iter(loader)
    while window := list(islice(batches, k)):
        yield window


model = Decoder().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in windows(DataLoader(clips(), batch_size=b, collate_fn=collate)):
    frames = sum(mel.size(0) * mel.size(1) for mel, _, _ in window)
    for mel, lengths, speaker in window:
        mask = torch.arange(mel.size(1))[None] < lengths[:, None]
        error = (model(mel, speaker) - mel).abs().mean(-1)
        (error * mask).sum().div(frames).backward()
    optimizer.step()
    optimizer.zero_grad()
