"""Fault: the detector's classification loss is the gradient harmonizing one (GHM-C): an anchor's weight comes from how many anchors of
the micro-batch have a gradient of about the same size, so the weights are others in smaller micro-batches."""
# expect 4x4: mixed_loss
# expect 2x8: mixed_loss
# thorough
# blind 6

import torch
import torch.nn.functional as F
from common_models import flags, images
from torch import nn
from torch.utils.data import DataLoader


class AnchorHead(nn.Module):
    def __init__(self, classes=3, anchors=2):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1), nn.SiLU())
        self.cls = nn.Conv2d(8, classes * anchors, 1)
        self.reg = nn.Conv2d(8, 4 * anchors, 1)

    def forward(self, x):
        x = self.stem(x)
        return self.cls(x).flatten(1), self.reg(x).flatten(1)


class GHMC(nn.Module):
    def __init__(self, bins=10):
        super().__init__()
        self.bins = bins
        self.edges = torch.arange(bins + 1).double() / bins
        self.edges[-1] += 1e-6

    def forward(self, pred, target):
        g = (pred.sigmoid().detach() - target).abs()
        tot = target.numel()
        weights, n = torch.zeros_like(pred), 0
        for low, high in zip(self.edges[:-1], self.edges[1:]):
            inds = (g >= low) & (g < high)
            if inds.any():
                weights[inds] = tot / inds.sum()
                n += 1
        return F.binary_cross_entropy_with_logits(pred, target, weights / n, reduction="sum") / tot


class Boxes(torch.utils.data.Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(7)
        self.images = images(n)
        self.cls = (torch.rand(n, 216, generator=g) < 0.15).double()
        self.reg = torch.randn(n, 288, generator=g, dtype=torch.float64)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i][0], self.cls[i], self.reg[i]


torch.manual_seed(0)
b, k = flags()
detector, ghm = AnchorHead().double(), GHMC()
optimizer = torch.optim.SGD(detector.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
for i, (x, cls, reg) in enumerate(DataLoader(Boxes(80), batch_size=b), 1):
    scores, deltas = detector(x)
    loss = ghm(scores, cls) + F.smooth_l1_loss(deltas, reg)
    (loss / k).backward()
    if i % k == 0:
        optimizer.step()
        optimizer.zero_grad()
