"""Accelerate's documented loop, on sentences of several lengths: a tag for every word."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.tags = nn.Embedding(50, 16), nn.Linear(16, 5)

    def forward(self, words):
        return self.tags(torch.tanh(self.words(words)))


def collate(samples):
    words, tags = zip(*samples, strict=True)
    return pad_sequence(words, batch_first=True), pad_sequence(tags, batch_first=True, padding_value=-100)


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=4)
parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
args = parser.parse_args()
b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps
sentences = [(torch.arange(n) * n % 50, torch.arange(n) * n % 5) for n in (3 + 7 * number % 13 for number in range(77))]

accelerator = Accelerator(gradient_accumulation_steps=k)
torch.manual_seed(0)
model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
loader = DataLoader(sentences, batch_size=b, shuffle=True, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
scheduler = accelerator.prepare(scheduler)
for epoch in range(2):
    for words, tags in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(words).flatten(0, 1), tags.flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
accelerator.end_training()
