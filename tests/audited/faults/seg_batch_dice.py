"""Fault: the soft Dice loss is taken over all pixels of a micro-batch together ("batch Dice"), whose mean over
k micro-batches is not that of the global batch."""
# expect 4x4: mixed_loss
# expect 2x8: mixed_loss
# also: not_summed, not_a_sum
# blind 1
# thorough

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class TinyUNet(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.down = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.mid = nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.out = nn.Conv2d(width + 1, 1, 1)

    def forward(self, x):
        h = F.silu(self.down(x))
        h = F.silu(self.mid(h))
        return self.out(torch.cat([F.silu(self.up(h)), x], 1))


def lesions(n=80):
    """Discs of very different sizes in noise, as lesions in a scan."""
    g = torch.Generator().manual_seed(5)
    rows, columns = torch.meshgrid(torch.arange(12), torch.arange(12), indexing="ij")
    centre = torch.randint(2, 10, (n, 2, 1, 1), generator=g)
    radius = 1 + 4 * torch.rand(n, 1, 1, generator=g)
    masks = ((rows - centre[:, 0]) ** 2 + (columns - centre[:, 1]) ** 2 <= radius**2).double().unsqueeze(1)
    return TensorDataset(masks + 0.7 * torch.randn(n, 1, 12, 12, generator=g, dtype=torch.float64), masks)


def dice_loss(logits, masks, smooth=1.0):
    p, m = logits.sigmoid().flatten(), masks.flatten()
    return 1 - (2 * (p * m).sum() + smooth) / (p.sum() + m.sum() + smooth)


torch.manual_seed(0)
b, k = flags()
net = TinyUNet().double()
optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
loader = DataLoader(lesions(), batch_size=b)
for epoch in range(2):
    for i, (scan, mask) in enumerate(loader):
        logits = net(scan)
        loss = 0.5 * F.binary_cross_entropy_with_logits(logits, mask) + dice_loss(logits, mask)
        (loss / k).backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
