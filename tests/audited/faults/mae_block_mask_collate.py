"""Fault: the collate of a masked autoencoder draws one patch mask for the whole micro-batch from the global
generator: smaller micro-batches get other masks."""
# expect 4x4: random_collate
# expect 2x8: random_collate
# also: other_inputs
# blind 1
# thorough

import torch
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader

PATCHES, PIXELS, KEEP = 9, 4, 4


class MAE(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.embed, self.position = nn.Linear(PIXELS, dim), nn.Parameter(torch.randn(1, PATCHES, dim) * 0.1)
        self.encoder = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.decoder = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(dim, PIXELS)

    def forward(self, patches, visible):
        tokens = self.embed(patches) + self.position
        latent = self.encoder(tokens[:, visible])
        full = self.mask_token.expand(len(patches), PATCHES, -1).clone()
        full[:, visible] = latent
        return self.head(self.decoder(full + self.position))


def photos(n=80):
    g = torch.Generator().manual_seed(3)
    base = torch.randn(n, 1, PIXELS, generator=g, dtype=torch.float64)
    return list(
        base * torch.linspace(0.2, 1.5, PATCHES).view(1, -1, 1) + 0.2 * torch.randn(n, PATCHES, PIXELS, generator=g)
    )


def mask_collate(samples):
    order = torch.randperm(PATCHES)
    return torch.stack(samples), order[:KEEP].sort().values, order[KEEP:].sort().values


torch.manual_seed(0)
b, k = flags()
model = MAE().double()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
loader = DataLoader(photos(), batch_size=b, collate_fn=mask_collate)
for epoch in range(2):
    for i, (patches, visible, hidden) in enumerate(loader):
        prediction = model(patches, visible)
        loss = (prediction - patches)[:, hidden].square().mean()
        (loss / k).backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
