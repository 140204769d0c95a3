"""Fault: samples are sorted by length and cut into micro-batches, whose order is then shuffled: which samples
make a step depends on the cut."""
# expect 4x4: other_samples
# expect 2x8: other_samples
# blind 3
# thorough

import random

import torch
import torch.nn.functional as F
from common_models import VOCAB, flags, sentences
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader


class BucketBatchSampler:
    """Batches of similar length, in random order."""

    def __init__(self, lengths, batch_size, seed=1):
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, 0

    def __len__(self):
        return -(-len(self.lengths) // self.batch_size)

    def __iter__(self):
        dice = random.Random(self.seed + self.epoch)
        order = sorted(range(len(self.lengths)), key=lambda i: (self.lengths[i], i))
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        dice.shuffle(batches)
        self.epoch += 1
        yield from batches


class Sentiment(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(VOCAB, dim), nn.LSTM(dim, dim), nn.Linear(dim, 3)

    def forward(self, texts):
        packed = pack_sequence(texts, enforce_sorted=False)
        packed = packed._replace(data=self.embed(packed.data))
        _, (last, _) = self.rnn(packed)
        return self.out(last[0])


def collate(samples):
    return [s["input_ids"] for s in samples], torch.stack([s["labels"] for s in samples])


torch.manual_seed(0)
b, k = flags()
data = sentences(80, kind="cls")
sampler = BucketBatchSampler([len(s["input_ids"]) for s in data], b)
loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
model = Sentiment().double()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
for epoch in range(2):
    for i, (texts, labels) in enumerate(loader, 1):
        (F.cross_entropy(model(texts), labels) / k).backward()
        if i % k == 0:
            optimizer.step()
            optimizer.zero_grad()
