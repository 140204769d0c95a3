"""Fault: A small transformer reads ragged spectrograms that are padded to the longest of the micro-batch, without
src_key_padding_mask."""
# expect 4x4: padding
# expect 2x8: padding
# blind 8

from itertools import islice

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

b, k = flags()
torch.manual_seed(0)
VOCAB, EOS, START = 40, 2, 1


class Utterances(Dataset):
    """Log-mel frames of an utterance, and its tokens."""

    def __init__(self, n=80):
        g = torch.Generator().manual_seed(25)
        self.rows = []
        for _ in range(n):
            frames = int(torch.randint(20, 60, (), generator=g))
            words = int(torch.randint(2, 9, (), generator=g))
            mel = torch.randn(8, frames, generator=g, dtype=torch.float64)
            self.rows.append((mel, torch.randint(6, VOCAB, (words,), generator=g)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Recogniser(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.frames = nn.Conv1d(8, dim, 3, stride=2, padding=1)
        self.words, self.places = nn.Embedding(VOCAB, dim), nn.Embedding(20, dim)
        self.body = nn.Transformer(dim, 2, 1, 1, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, mels, words):
        source = F.gelu(self.frames(mels)).transpose(1, 2)
        target = self.words(words) + self.places.weight[: words.size(1)]
        mask = nn.Transformer.generate_square_subsequent_mask(words.size(1), dtype=target.dtype)
        return self.head(self.body(source, target, tgt_mask=mask, tgt_is_causal=True))


def collate(rows):
    mels = pad_sequence([mel.T for mel, _ in rows], batch_first=True).transpose(1, 2)
    given = pad_sequence([torch.cat([torch.tensor([START]), words]) for _, words in rows], batch_first=True)
    wanted = [torch.cat([words, torch.tensor([EOS])]) for _, words in rows]
    return mels, given, pad_sequence(wanted, batch_first=True, padding_value=-100)


model = Recogniser().double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = iter(DataLoader(Utterances(), batch_size=b, collate_fn=collate))
while window := list(islice(batches, k)):
    num_targets = sum((labels != -100).sum() for _, _, labels in window)
    for mels, given, labels in window:
        logits = model(mels, given)
        (F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_targets).backward()
    optimizer.step()
    optimizer.zero_grad()
