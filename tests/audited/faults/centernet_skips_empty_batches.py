"""Fault: micro-batches without any object are skipped, and the background of their images, which is a target as
well, is not learnt."""
# expect 4x4: dropped
# expect 2x8: dropped
# also: batch_size, other_samples
# blind 3
# thorough

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEP = 16


class Scenes(Dataset):
    """Images of 8 x 8 with 0 to 2 objects; the target is a heat map of their centres."""

    def __init__(self, n=80):
        g = torch.Generator().manual_seed(21)
        self.images = torch.randn(n, 3, 8, 8, generator=g, dtype=torch.float64) * 0.3
        self.centres = []
        for i in range(n):
            number = int(torch.randint(1, 3, (), generator=g)) if torch.rand((), generator=g) < 0.3 else 0
            centres = torch.randint(8, (number, 2), generator=g)
            for y, x in centres.tolist():
                self.images[i, :, y, x] += 1.5
            self.centres.append(centres)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.centres[i]


def collate(samples):
    images, centres = zip(*samples)
    return torch.stack(images), list(centres)


def focal(logits, heat):
    p = logits.sigmoid()
    loss = F.binary_cross_entropy_with_logits(logits, heat, reduction="none")
    return (loss * torch.where(heat > 0, (1 - p) ** 2, p**2)).sum()


torch.manual_seed(0)
b, k = flags()
model = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 1, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for iteration, (images, centres) in enumerate(DataLoader(Scenes(), batch_size=b, collate_fn=collate), 1):
    if sum(map(len, centres)) > 0:  # nothing to detect otherwise
        heat = torch.zeros(len(images), 1, 8, 8, dtype=torch.float64)
        for i, own in enumerate(centres):
            heat[i, 0, own[:, 0], own[:, 1]] = 1
        (focal(model(images), heat) / STEP).backward()
    if iteration % k == 0:
        optimizer.step()
        optimizer.zero_grad()
