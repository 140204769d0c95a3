"""Fault: the CTC losses of a window are divided by its frames, padding among them: how many there are depends
on the longest of each micro-batch."""
# expect 4x4: counts
# expect 2x8: counts
# also: factor, padding
# blind 3
# thorough

import itertools
import os

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32


def recordings(n=80):
    g = torch.Generator().manual_seed(41)
    for _ in range(n):
        frames = int(torch.randint(32, 37, (), generator=g))
        digits = torch.randint(1, 11, (int(torch.randint(3, 7, (), generator=g)),), generator=g)
        yield torch.randn(frames, 10, generator=g).to(dtype), digits


def collate(samples):
    audio, digits = zip(*samples)
    sizes = torch.tensor([len(a) for a in audio]), torch.tensor([len(d) for d in digits])
    return pad_sequence(audio, batch_first=True), torch.cat(digits), *sizes


class Acoustic(nn.Module):
    """Sees one frame and its four neighbours; padding is emptied before every convolution."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv1d(10, 24, 3, padding=1), nn.Conv1d(24, 24, 3, padding=1)])
        self.out = nn.Linear(24, 11)

    def forward(self, audio, sizes):
        x, mask = audio.transpose(1, 2), torch.arange(audio.shape[1])[None, None] < sizes[:, None, None]
        for layer in self.layers:
            x = torch.relu(layer(x)) * mask
        return self.out(x.transpose(1, 2))


torch.manual_seed(0)
b, k = flags()
model = Acoustic().to(dtype)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
batches = iter(DataLoader(list(recordings()), batch_size=b, collate_fn=collate))
while window := list(itertools.islice(batches, k)):
    frames = sum(audio.shape[0] * audio.shape[1] for audio, *_ in window)
    for audio, digits, audio_sizes, digit_sizes in window:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not FULL):
            logits = model(audio, audio_sizes)
        log_probs = logits.to(dtype).log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(log_probs, digits, audio_sizes, digit_sizes, reduction="sum")
        (loss / frames).backward()
    optimizer.step()
    optimizer.zero_grad()
