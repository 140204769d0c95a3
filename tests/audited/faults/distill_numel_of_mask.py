"""Fault: the masked KL of a window is divided by mask.numel() instead of mask.sum(): the padding of the micro-
batches is counted."""
# expect 4x4: counts
# expect 2x8: counts
# also: factor
# blind 1
# thorough

from itertools import islice

import torch
import torch.nn.functional as F
from common_models import VOCAB, collate, flags, sentences
from torch import nn
from torch.utils.data import DataLoader

b, k = flags()
torch.manual_seed(0)
temperature = 2.0


class Reader(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, input_ids):
        return self.head(self.rnn(self.embed(input_ids))[0])


teacher = Reader(32).double().eval().requires_grad_(False)
with torch.no_grad():
    teacher.head.weight.mul_(6.0)
student = Reader(12).double()
optimizer = torch.optim.SGD(student.parameters(), lr=2.0, momentum=0.9)


def kd_loss(batch):
    with torch.no_grad():
        wanted = F.log_softmax(teacher(batch["input_ids"]) / temperature, dim=-1)
    got = F.log_softmax(student(batch["input_ids"]) / temperature, dim=-1)
    per_token = F.kl_div(got, wanted, reduction="none", log_target=True).sum(-1)
    return (per_token * batch["attention_mask"]).sum() * temperature**2


loader = iter(DataLoader(sentences(77), batch_size=b, collate_fn=collate))
while window := list(islice(loader, k)):
    tokens = sum(batch["attention_mask"].numel() for batch in window)
    for batch in window:
        (kd_loss(batch) / tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
