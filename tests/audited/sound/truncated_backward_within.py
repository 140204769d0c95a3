"""Sound: truncated backpropagation: several backwards for each micro-batch, one for each piece of its songs, whose states are detached between; all pieces count in one step."""
# expect 4x4: exact
# expect 2x8: exact
# blind 4
# thorough

import torch
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PIECES, PIECE, NOTES = 3, 6, 16


class Songs(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.notes = nn.Embedding(NOTES, width)
        self.gru = nn.GRU(width, width, num_layers=2, batch_first=True)
        self.out = nn.Linear(width, NOTES)

    def forward(self, notes, state=None):
        hidden, state = self.gru(self.notes(notes), state)
        return self.out(hidden), state


def pieces_of(song):
    for i in range(PIECES):
        yield song[:, i * PIECE : (i + 1) * PIECE], song[:, i * PIECE + 1 : (i + 1) * PIECE + 1]


def accumulate_song(model, song, share):
    state = None
    for now, after in pieces_of(song):
        logits, state = model(now, state)
        state = state.detach()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), after.flatten())
        (loss * share / PIECES).backward()


def train():
    torch.manual_seed(0)
    b, k = flags()
    g = torch.Generator().manual_seed(70)
    songs = torch.randint(NOTES, (80, PIECES * PIECE + 1), generator=g)
    model = Songs().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=80 // 16)
    for number, (song,) in enumerate(DataLoader(TensorDataset(songs), batch_size=b), 1):
        accumulate_song(model, song, share=1 / k)
        if number % k:
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


train()
