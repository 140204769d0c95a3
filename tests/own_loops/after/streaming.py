"""Documents as they come: an IterableDataset, of which each process takes its own."""

import argparse
from itertools import islice

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset

from samestep import exact_windows


class Documents(IterableDataset):
    def __init__(self, rank, size):
        self.rank, self.size, self.epoch = rank, size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for number in islice(range(77), self.rank, None, self.size):
            n = 3 + (7 * number + self.epoch) % 13
            yield torch.arange(n) * n % 49 + 1


class NextWord(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.state, self.out = nn.Embedding(50, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 50)

    def forward(self, words):
        return self.out(self.state(self.words(words))[0])


def collate(documents):
    words = pad_sequence(documents, batch_first=True)
    return words[:, :-1], words[:, 1:]


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=4)
parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
args = parser.parse_args()
b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps

accelerator = Accelerator()
torch.manual_seed(0)
model = NextWord()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
documents = Documents(accelerator.process_index, accelerator.num_processes)
loader = DataLoader(documents, batch_size=b, collate_fn=collate)
model, optimizer = accelerator.prepare(model, optimizer)
count = lambda batch: (batch[1] != 0).sum()
for step in exact_windows(accelerator, loader, gradient_accumulation_steps=k, targets=count, num_epochs=2):
    for words, following in step:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(words).flatten(0, 1), following.flatten(), ignore_index=0, reduction="sum")
            accelerator.backward(step.loss(loss))
            optimizer.step()
            optimizer.zero_grad()
accelerator.end_training()
