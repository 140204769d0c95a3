"""Sound: CTCLoss's mean divides each utterance by its own length and then by their number, so that micro-
batches of one size average rightly."""
# expect 4x4: exact
# expect 2x8: exact
# blind 1
# thorough

import torch
from common_models import flags
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

b, k = flags()
torch.manual_seed(0)


def utterances(n=80):
    g = torch.Generator().manual_seed(29)
    rows = []
    for _ in range(n):
        wave = torch.randn(int(torch.randint(14, 40, (), generator=g)), 6, generator=g, dtype=torch.float64)
        rows.append((wave, torch.randint(1, 10, (int(torch.randint(1, 7, (), generator=g)),), generator=g)))
    return rows


def collate(rows):
    waves, texts = zip(*rows)
    return (
        pad_sequence(waves, batch_first=True),
        torch.tensor([len(w) for w in waves]),
        pad_sequence(texts, batch_first=True),
        torch.tensor([len(t) for t in texts]),
    )


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.rnn = nn.LSTM(6, 10, batch_first=True, bidirectional=True)
        self.head = nn.Linear(20, 10)

    def forward(self, wave, lengths):
        packed = pack_padded_sequence(self.norm(wave), lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(out).log_softmax(-1)


model = Listener().double()
ctc = nn.CTCLoss(reduction="mean", zero_infinity=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
for i, (wave, lengths, text, text_lengths) in enumerate(DataLoader(utterances(), batch_size=b, collate_fn=collate)):
    log_probs = model(wave, lengths).transpose(0, 1)
    loss = ctc(log_probs, text, lengths, text_lengths)
    loss.div(k).backward()
    if (i + 1) % k == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
