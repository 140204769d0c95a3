"""Fault: CTC is told that every utterance is as long as the padded batch: frames of padding may be aligned."""
# expect 4x4: padding
# expect 2x8: padding
# blind 1
# thorough

import torch
from common_models import flags
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

b, k = flags()
torch.manual_seed(0)


class Utterances(Dataset):
    """Mel frames and their characters (0 is the blank)."""

    def __init__(self, n=80):
        g = torch.Generator().manual_seed(5)
        self.rows = []
        for _ in range(n):
            frames = int(torch.randint(12, 40, (), generator=g))
            chars = int(torch.randint(2, 6, (), generator=g))
            mel = torch.randn(frames, 8, generator=g, dtype=torch.float64)
            self.rows.append((mel, torch.randint(1, 12, (chars,), generator=g)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    mels, texts = zip(*rows)
    lengths = torch.tensor([len(t) for t in texts])
    return pad_sequence(mels, batch_first=True), torch.cat(texts), lengths


class AcousticModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(8, 20, batch_first=True)  # causal: what is padded behind does not reach the frames
        self.head = nn.Linear(20, 12)

    def forward(self, mel):
        hidden, _ = self.rnn(mel)
        return self.head(hidden).log_softmax(-1).transpose(0, 1)


model = AcousticModel().double()
ctc = nn.CTCLoss(blank=0, zero_infinity=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
for step, (mel, text, target_lengths) in enumerate(DataLoader(Utterances(), batch_size=b, collate_fn=collate), 1):
    log_probs = model(mel)
    input_lengths = torch.full((mel.size(0),), log_probs.size(0))
    loss = ctc(log_probs, text, input_lengths, target_lengths)
    (loss / k).backward()
    if step % k == 0:
        optimizer.step()
        optimizer.zero_grad()
