"""Fault: A masked autoencoder of pictures of different sizes, padded to the largest of the micro-batch: its mean squared
error counts pixels of padding."""
# expect 4x4: padding
# expect 2x8: padding
# also: mean_of_means, counts
# blind 8

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, Dataset

b, k = flags()
torch.manual_seed(0)


class Pictures(Dataset):
    def __init__(self, n=80):
        g = torch.Generator().manual_seed(36)
        sizes = [tuple(4 * int(torch.randint(1, 5, (), generator=g)) for _ in "hw") for _ in range(n)]
        self.rows = [torch.randn(3, *size, generator=g, dtype=torch.float64) for size in sizes]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    height, width = (max(row.size(side) for row in rows) for side in (1, 2))
    return torch.stack([F.pad(row, (0, width - row.size(2), 0, height - row.size(1))) for row in rows])


model = nn.Sequential(nn.Conv2d(3, 12, 4, stride=4), nn.GELU(), nn.ConvTranspose2d(12, 3, 4, stride=4)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for number, pictures in enumerate(DataLoader(Pictures(), batch_size=b, collate_fn=collate), 1):
    (F.mse_loss(model(pictures), pictures) / k).backward()
    if number % k == 0:
        optimizer.step()
        optimizer.zero_grad()
