"""Fault: layers are unfrozen after so many batches, and micro-batches are counted: with k micro-batches the
body trains k times earlier."""
# expect 4x4: parameters
# expect 2x8: parameters
# thorough
# blind 3

import torch
import torch.nn.functional as F
from common_models import VOCAB, flags, sentences
from torch import nn
from torch.utils.data import DataLoader


class Classifier(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.body = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, 3))

    def forward(self, ids):
        states, _ = self.body(self.embedding(ids))
        return self.head(states[:, -1])

    def groups(self):
        return [self.head, self.body, self.embedding]


class GradualUnfreezing:
    """One more group of layers from the last to the first, every `every` batches."""

    def __init__(self, model, every):
        self.groups, self.every, self.batches = model.groups(), every, 0
        for group in self.groups[1:]:
            group.requires_grad_(False)

    def batch_end(self):
        self.batches += 1
        if self.batches % self.every == 0 and self.batches // self.every < len(self.groups):
            self.groups[self.batches // self.every].requires_grad_(True)


def main():
    per_device_batch, accumulate = flags()
    torch.manual_seed(0)
    model = Classifier().double()
    rates = zip(model.groups(), (0.3, 0.3 / 2.6, 0.3 / 2.6**2))
    optimizer = torch.optim.SGD([{"params": group.parameters(), "lr": rate} for group, rate in rates], momentum=0.8)
    unfreezing = GradualUnfreezing(model, every=2)
    data = [(s["input_ids"], s["labels"]) for s in sentences(80, 12, 12, kind="cls")]
    for number, (ids, label) in enumerate(DataLoader(data, batch_size=per_device_batch), 1):
        loss = F.cross_entropy(model(ids), label) / accumulate
        loss.backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        unfreezing.batch_end()


main()
