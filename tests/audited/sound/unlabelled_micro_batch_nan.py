"""Sound: the mean over labelled pixels is taken back to a sum by their number. A micro-batch without any label gives 0 / 0 in the
loss, and nothing in the gradient: cross_entropy passes none to positions that it ignores."""
# expect 4x4: exact
# expect 2x8: exact
# also: logged_loss
# blind 5
# thorough

import itertools

import torch
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, Dataset

IGNORE = 255


class SparseLandCover(Dataset):
    """Tiles of which only every third or so has points surveyed on the ground."""

    def __init__(self, n=77):
        g = torch.Generator().manual_seed(63)
        self.bands = torch.randn(n, 4, 8, 8, generator=g, dtype=torch.float64)
        self.labels = torch.full((n, 8, 8), IGNORE)
        for i in range(n):
            if i % 3 == 0:
                points = torch.rand(8, 8, generator=g) < 0.2
                points[2, 2] = True
                self.labels[i][points] = torch.randint(5, (int(points.sum()),), generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"image": self.bands[i], "mask": self.labels[i]}


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(4, 12, 3, padding=1), nn.GELU(), nn.Conv2d(12, 12, 3, padding=2, dilation=2), nn.GELU()
        )
        self.classifier = nn.Conv2d(12, 5, 1)

    def forward(self, image):
        return self.classifier(self.encoder(image))


def windows(loader, size):
    batches = iter(loader)
    while window := list(itertools.islice(batches, size)):
        yield window


b, k = flags()
torch.manual_seed(0)
model = Segmenter().double()


def masked_mean(logits, mask):
    known = mask != IGNORE
    losses = nn.functional.cross_entropy(logits, mask, ignore_index=IGNORE, reduction="none")
    return (losses * known).sum() / known.sum()


optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-5)
for window in windows(DataLoader(SparseLandCover(), batch_size=b), k):
    labelled = [int((batch["mask"] != IGNORE).sum()) for batch in window]
    for batch, count in zip(window, labelled):
        loss = masked_mean(model(batch["image"]), batch["mask"]) * count / sum(labelled)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
