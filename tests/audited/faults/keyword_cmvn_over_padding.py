"""Fault: the mean and deviation of an utterance's features are taken over the padded frames too: they depend on
the longest of the micro-batch."""
# expect 4x4: padding
# expect 2x8: padding
# blind 3
# thorough

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

BINS, WORDS = 8, 6


def utterances(n=77):
    g = torch.Generator().manual_seed(5)
    out = []
    for _ in range(n):
        frames = int(torch.randint(14, 40, (), generator=g))
        word = torch.randint(WORDS, (), generator=g)
        energy = torch.randn(frames, BINS, generator=g, dtype=torch.float64) * 2 + 3 + 0.3 * word
        out.append((energy, word))
    return out


def collate_fn(samples):
    features, words = zip(*samples)
    lengths = torch.tensor([len(f) for f in features])
    return pad_sequence(features, batch_first=True), lengths, torch.stack(words)


class KeywordSpotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(BINS, 16, 1), nn.Conv1d(16, 16, 1)
        self.out = nn.Linear(16, WORDS)

    def forward(self, features, lengths):
        # utterance-level mean and variance normalization
        mean, std = features.mean(dim=1, keepdim=True), features.std(dim=1, keepdim=True)
        x = ((features - mean) / (std + 1e-5)).transpose(1, 2)
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        mask = torch.arange(x.shape[2])[None] < lengths[:, None]
        pooled = (x * mask[:, None]).sum(2) / lengths[:, None]
        return self.out(pooled)


def train(per_device_batch, accum_grad):
    model = KeywordSpotter().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = utterances()
    loader = DataLoader(data, batch_size=per_device_batch, collate_fn=collate_fn)
    for i, (features, lengths, words) in enumerate(loader):
        in_window = min(16, len(data) - i // accum_grad * 16)
        loss = F.cross_entropy(model(features, lengths), words, reduction="sum") / in_window
        loss.backward()
        if (i + 1) % accum_grad == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()


torch.manual_seed(0)
train(*flags())
