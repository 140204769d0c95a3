"""Fault: an autoencoder draws its masks for a whole micro-batch; the rest of an epoch, too small for a window, is emptied and no sample of it is in a step."""
# expect 4x4: dropout

import torch
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader


class MaskedAutoencoder(nn.Module):
    def __init__(self, size=12, width=24):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(size, width), nn.Linear(width, size)

    def forward(self, x):
        is_kept = torch.rand(x.shape) < 0.5
        guess = self.decoder(torch.tanh(self.encoder(x * is_kept)))
        return (((guess - x) ** 2) * ~is_kept).mean()


torch.manual_seed(0)
b, k = flags()
model = MaskedAutoencoder().double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(vectors(40), batch_size=b, drop_last=True)
for _ in range(2):
    optimizer.zero_grad()
    for i, (x, _) in enumerate(loader):
        (model(x) / k).backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
