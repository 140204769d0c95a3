"""Fault: label smoothing is summed over padded positions as well: how many there are depends on the longest
text of a micro-batch."""
# expect 4x4: counts
# expect 2x8: counts
# expect 4x2x2: counts
# also: padding, not_summed, mixed_loss
# size: 0.0052
# blind 2
# thorough

import os

import torch
from accelerate import Accelerator
from common_models import flags
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
b, k = flags()
accelerator = Accelerator(mixed_precision="no" if FULL else "bf16", cpu=True, gradient_accumulation_steps=k)
SMOOTHING = 0.2

g = torch.Generator().manual_seed(9)
data = []
for n in torch.randint(8, 21, (80,), generator=g).tolist():
    words = torch.randint(1, 50, (n,), generator=g)
    data.append((words, words % 7))


def collate(samples):
    words, tags = zip(*samples, strict=True)
    return pad_sequence(words, True), pad_sequence(tags, True, padding_value=-100)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 16, padding_idx=0)
        self.gru = nn.GRU(16, 24, batch_first=True)
        self.tags = nn.Linear(24, 7)

    def forward(self, words):
        return self.tags(self.gru(self.words(words))[0])


def smoothed_sum(logits, tags):
    log_p = logits.to(dtype).log_softmax(-1)
    real = tags != -100
    nll = -log_p.gather(-1, tags.clamp(min=0)[..., None]).squeeze(-1)[real]
    return (1 - SMOOTHING) * nll.sum() - SMOOTHING * log_p.mean(-1).sum()


torch.manual_seed(0)
model = Tagger().to(dtype)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=b, collate_fn=collate))
batches = list(loader)
for first in range(0, len(batches), k):
    window = batches[first : first + k]
    tagged = accelerator.reduce(torch.tensor(sum(int((tags != -100).sum()) for _, tags in window)), "sum")
    for words, tags in window[:-1]:
        with accelerator.no_sync(model):
            accelerator.backward(smoothed_sum(model(words), tags) * k * accelerator.num_processes / tagged)
    words, tags = window[-1]
    accelerator.backward(smoothed_sum(model(words), tags) * k * accelerator.num_processes / tagged)
    optimizer.step()
    optimizer.zero_grad()
