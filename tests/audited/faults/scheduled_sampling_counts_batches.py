"""Fault: the share of the decoder's inputs that come from the reference text is lowered with every micro-batch, not with every
update: the micro-batches of a window decode under other inputs, and the schedule runs out k times too early."""

# expect 4x4: other_inputs
# expect 2x8: other_inputs
# blind 7
# thorough
# open
import torch
import torch.nn.functional as F
from common_models import VOCAB, flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BOS = 1


class Seq2Seq(nn.Module):
    def __init__(self, dim=20, steps=10):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.encoder = nn.GRU(dim, dim, batch_first=True)
        self.cell = nn.GRUCell(dim, dim)
        self.head = nn.Linear(dim, VOCAB)
        g = torch.Generator().manual_seed(9)
        self.register_buffer("threshold", torch.rand(steps, generator=g, dtype=torch.float64))

    def forward(self, source, target, teacher_forcing_ratio):
        _, state = self.encoder(self.embed(source))
        state, token, logits = state[0], torch.full_like(target[:, 0], BOS), []
        for t in range(target.size(1)):
            state = self.cell(self.embed(token), state)
            logits.append(self.head(state))
            from_text = self.threshold[t] < teacher_forcing_ratio
            token = target[:, t] if from_text else logits[-1].argmax(-1)
        return torch.stack(logits, 1)


class ScheduledSampling:
    """Linear decay from start to end."""

    def __init__(self, start=1.0, end=0.1, decay_steps=12):
        self.start, self.end, self.decay_steps, self.count = start, end, decay_steps, 0

    @property
    def ratio(self):
        return max(self.end, self.start - (self.start - self.end) * self.count / self.decay_steps)

    def step(self):
        self.count += 1


def reversed_words(n=96, length=10):
    g = torch.Generator().manual_seed(2)
    source = torch.randint(3, VOCAB, (n, length), generator=g)
    return TensorDataset(source, source.flip(1))


if __name__ == "__main__":
    torch.manual_seed(0)
    b, k = flags()
    model = Seq2Seq().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    sampling = ScheduledSampling()
    for i, (source, target) in enumerate(DataLoader(reversed_words(), batch_size=b)):
        logits = model(source, target, sampling.ratio)
        sampling.step()
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        (loss / k).backward()
        if (i + 1) % k == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
