"""Fault: the loss of a step is divided by the number of label positions, and padded positions are counted as well."""
# expect 4x4: counts
# expect 2x8: counts
# also: factor
# blind

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

PAD, CHARS = 0, 40


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(CHARS, 12, padding_idx=PAD)
        self.rnn = nn.LSTM(12, 16, batch_first=True)
        self.out = nn.Linear(16, CHARS)

    def forward(self, ids):
        return self.out(self.rnn(self.embed(ids))[0])


def collate(names):
    ids = pad_sequence(names, batch_first=True, padding_value=PAD)
    return ids[:, :-1], ids[:, 1:]


def update(model, optimizer, window):
    num_tokens = sum(labels.numel() for _, labels in window)
    for ids, labels in window:
        losses = F.cross_entropy(model(ids).transpose(1, 2), labels, ignore_index=PAD, reduction="none")
        (losses.sum() / num_tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
gen = torch.Generator().manual_seed(17)
names = [torch.randint(1, CHARS, (int(n),), generator=gen) for n in torch.randint(3, 15, (90,), generator=gen)]
torch.manual_seed(0)
model = CharModel().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
window = []
loader = DataLoader(names, batch_size=args.per_device_train_batch_size, collate_fn=collate)
for batch in loader:
    window.append(batch)
    if len(window) == args.gradient_accumulation_steps:
        update(model, optimizer, window)
        window = []
if window:
    update(model, optimizer, window)
