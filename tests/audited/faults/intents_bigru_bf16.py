"""Fault: the backward direction of a GRU starts in the padding of its micro-batch, as pack_padded_sequence is missing (loss and counts are masked)."""
# expect 4x4: padding
# expect 2x8: padding
# blind 4
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
TAGS = 9


def utterances(n=77):
    g = torch.Generator().manual_seed(44)
    out = []
    for _ in range(n):
        length = int(torch.randint(14, 17, (), generator=g))
        words = torch.randint(1, 60, (length,), generator=g)
        out.append((words, (words * 5 + words.roll(-1)) % TAGS))
    return out


def collate(samples):
    words, tags = zip(*samples)
    return pad_sequence(words, True), pad_sequence(tags, True, padding_value=-100)


class SlotTagger(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embed = nn.Embedding(60, width, padding_idx=0)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.out = nn.Sequential(nn.Linear(2 * width, 32), nn.ReLU(), nn.Linear(32, TAGS))

    def forward(self, words):
        states, _ = self.gru(self.embed(words))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not FULL):
            return self.out(states)


torch.manual_seed(0)
b, k = flags()
model = SlotTagger().to(dtype)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, eps=1e-6)
batches = iter(DataLoader(utterances(), batch_size=b, collate_fn=collate))
while window := list(itertools.islice(batches, k)):
    tagged = sum(int((tags != -100).sum()) for _, tags in window)
    for words, tags in window:
        logits = model(words).to(dtype)
        loss = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=-100, reduction="sum")
        (loss / tagged).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
