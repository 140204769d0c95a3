"""Sound: seq2seq with label smoothing: the sum over real target tokens is divided by those of the whole window,
the short last one as well."""
# expect 4x4: exact
# expect 2x8: exact
# blind 1
# thorough

from itertools import islice

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

b, k = flags()
torch.manual_seed(0)
PAD, BOS, EOS, V = 0, 1, 2, 40


def pairs(n=77):
    g = torch.Generator().manual_seed(37)

    def sentence():
        return torch.randint(3, V, (int(torch.randint(2, 14, (), generator=g)),), generator=g)

    return [(sentence(), sentence()) for _ in range(n)]


def collate(rows):
    source = pad_sequence([s for s, _ in rows], batch_first=True, padding_value=PAD)
    given = pad_sequence([torch.cat([torch.tensor([BOS]), t]) for _, t in rows], batch_first=True, padding_value=PAD)
    wanted = pad_sequence([torch.cat([t, torch.tensor([EOS])]) for _, t in rows], batch_first=True, padding_value=PAD)
    return source, given, wanted


class Translator(nn.Module):
    def __init__(self, dim=14):
        super().__init__()
        self.embed = nn.Embedding(V, dim, padding_idx=PAD)
        self.encoder, self.decoder = nn.GRU(dim, dim, batch_first=True), nn.GRU(dim, dim, batch_first=True)
        self.mix = nn.Linear(2 * dim, dim)

    def forward(self, source, given):
        memory, _ = self.encoder(self.embed(source))
        last = (source != PAD).sum(1) - 1
        state = memory[torch.arange(len(source)), last].unsqueeze(0)
        out, _ = self.decoder(self.embed(given), state.contiguous())
        scores = (out @ memory.transpose(1, 2)).masked_fill((source == PAD)[:, None], float("-inf"))
        out = torch.tanh(self.mix(torch.cat([out, scores.softmax(-1) @ memory], -1)))
        return out @ self.embed.weight.T


model = Translator().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 3, (3 / (n + 1)) ** 0.5))
for epoch in range(2):
    batches = iter(DataLoader(pairs(), batch_size=b, collate_fn=collate))
    while window := list(islice(batches, k)):
        ntokens = sum(int((wanted != PAD).sum()) for _, _, wanted in window)
        for source, given, wanted in window:
            logits = model(source, given).flatten(0, 1)
            loss = F.cross_entropy(logits, wanted.flatten(), ignore_index=PAD, label_smoothing=0.1, reduction="sum")
            (loss / ntokens).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
