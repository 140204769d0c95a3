"""Sound: segmentation with class weights and ignored border pixels: the weighted sum of every micro-batch is
divided by the total weight of the valid pixels of the window, counted before its first backward."""
# expect 4x4: exact
# expect 2x8: exact
# blind 1
# thorough

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, Dataset

CLASSES, VOID = 3, 255


class Streets(Dataset):
    def __init__(self, n=77, size=8):
        g = torch.Generator().manual_seed(71)
        truth = torch.randn(n, CLASSES, size // 2, size // 2, generator=g, dtype=torch.float64)
        truth = F.interpolate(truth, scale_factor=2.0) - torch.tensor([0.0, 0.5, 1.0]).view(1, -1, 1, 1)
        self.labels = truth.argmax(1)
        self.pictures = truth[:, :2] + 0.5 * torch.randn(n, 2, size, size, generator=g, dtype=torch.float64)
        for label, border in zip(self.labels, torch.randint(3, (n,), generator=g).tolist()):
            label[:border] = label[size - border :] = VOID  # the number of valid pixels differs by picture

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, i):
        return self.pictures[i], self.labels[i]


def windows_of(loader, k):
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == k:
            yield window
            window = []
    if window:
        yield window


torch.manual_seed(0)
b, k = flags()
net = nn.Sequential(
    nn.Conv2d(2, 8, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(8, 8, 3, padding=2, dilation=2),
    nn.ReLU(),
    nn.Conv2d(8, CLASSES, 1),
).double()
weight = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
poly = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=10, power=0.9)
for epoch in range(2):
    for window in windows_of(DataLoader(Streets(), batch_size=b), k):
        total = sum(weight[label[label != VOID]].sum() for _, label in window)
        for picture, label in window:
            loss = F.cross_entropy(net(picture), label, weight=weight, ignore_index=VOID, reduction="sum")
            (loss / total).backward()
        optimizer.step()
        poly.step()
        optimizer.zero_grad()
