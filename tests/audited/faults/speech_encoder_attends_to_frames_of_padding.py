"""Fault: A small transformer reads ragged spectrograms that are padded to the longest of the micro-batch, without
src_key_padding_mask."""
# expect 4x4: padding
# expect 2x8: padding
# blind 8

from itertools import islice

import torch
import torch.nn.functional as F
from common_models import flags
from media_models import Utterances
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

b, k = flags()
torch.manual_seed(0)
VOCAB, EOS, START = 40, 2, 1


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
batches = iter(DataLoader(Utterances(25), batch_size=b, collate_fn=collate))
while window := list(islice(batches, k)):
    num_targets = sum((labels != -100).sum() for _, _, labels in window)
    for mels, given, labels in window:
        logits = model(mels, given)
        (F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_targets).backward()
    optimizer.step()
    optimizer.zero_grad()
