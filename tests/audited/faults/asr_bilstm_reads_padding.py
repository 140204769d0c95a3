"""Fault: the bidirectional LSTM of the acoustic model runs over padded features without packing: its backward direction starts in the
padding, whose length is that of the longest utterance of the micro-batch."""
# expect 4x4: padding
# expect 2x8: padding
# thorough
# blind 6

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

MELS, LETTERS = 6, 9


class Utterances(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(3)
        self.items = []
        for _ in range(n):
            frames = int(torch.randint(12, 30, (), generator=g))
            letters = int(torch.randint(2, 6, (), generator=g))
            self.items.append(
                (
                    torch.randn(frames, MELS, generator=g, dtype=torch.float64),
                    torch.randint(1, LETTERS, (letters,), generator=g),
                )
            )

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(items):
    feats, texts = zip(*items)
    return (
        pad_sequence(feats, batch_first=True),
        torch.tensor([len(f) for f in feats]),
        pad_sequence(texts, batch_first=True),
        torch.tensor([len(t) for t in texts]),
    )


class DeepSpeech(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Linear(MELS, 12)
        self.rnn = nn.LSTM(12, 10, batch_first=True, bidirectional=True)
        self.out = nn.Linear(20, LETTERS)

    def forward(self, feats):
        x = F.hardtanh(self.front(feats), 0, 20)
        x, _ = self.rnn(x)
        return self.out(x).log_softmax(-1)


torch.manual_seed(0)
b, k = flags()
model = DeepSpeech().double()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step, (feats, feat_lens, texts, text_lens) in enumerate(
    DataLoader(Utterances(80), batch_size=b, collate_fn=collate)
):
    log_probs = model(feats).transpose(0, 1)
    per_utterance = F.ctc_loss(log_probs, texts, feat_lens, text_lens, reduction="none", zero_infinity=True)
    (per_utterance / text_lens).mean().div(k).backward()
    if (step + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
