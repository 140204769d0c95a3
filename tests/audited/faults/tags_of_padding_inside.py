"""Fault: A tagger returns {"loss": ...} alone, of all positions: the tag 0 of padding is learned as if it were one."""
# expect 4x4: padding
# expect 2x8: padding
# thorough

from itertools import islice

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

b, k = flags()
torch.manual_seed(0)
g = torch.Generator().manual_seed(4)
rows = [
    (torch.randint(1, 30, (n,), generator=g), torch.randint(1, 5, (n,), generator=g))
    for n in (2 + i * 5 % 9 for i in range(80))
]


class Tagger(nn.Module):
    """A convolution over words, and a tag for each."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(30, 12, padding_idx=0)
        self.conv, self.norm, self.tags = nn.Conv1d(12, 16, 3, padding=1), nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, words, tags):
        hidden = self.conv(self.words(words).transpose(1, 2)).transpose(1, 2)
        logits = self.tags(self.norm(hidden * (words != 0)[..., None]))
        return {"loss": F.cross_entropy(logits.transpose(1, 2), tags, reduction="none").mean(1).mean()}


def collate(samples):
    return [pad_sequence(list(column), batch_first=True) for column in zip(*samples, strict=True)]


model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = iter(DataLoader(rows, batch_size=b, collate_fn=collate))
while window := list(islice(batches, k)):
    for words, tags in window:
        (model(words, tags)["loss"] / len(window)).backward()
    optimizer.step()
    optimizer.zero_grad()
