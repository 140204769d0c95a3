"""Fault: the mean over all positions, padding included: a sample's output depends on the longest of its micro-
batch."""
# expect 4x4: padding
# expect 2x8: padding

import torch
import torch.nn.functional as F
from common_models import VOCAB, collate, flags, sentences
from torch import nn
from torch.utils.data import DataLoader


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, 3)

    def forward(self, input_ids, **_):
        return self.head(torch.tanh(self.words(input_ids)).mean(1))


torch.manual_seed(0)
b, k = flags()
model = Pooled().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for number, batch in enumerate(DataLoader(sentences(80, kind="cls"), batch_size=b, collate_fn=collate), 1):
    (F.cross_entropy(model(batch["input_ids"]), batch["labels"]) / k).backward()
    if number % k == 0:
        optimizer.step()
        optimizer.zero_grad()
