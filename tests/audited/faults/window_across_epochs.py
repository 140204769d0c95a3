"""Fault: the counter of micro-batches is not reset at the end of an epoch of 76 samples, so its last window (12
samples) is filled up with the first 4 of the next epoch instead of stepping."""
# expect 4x4: other_samples
# expect 2x8: other_samples
# also: batch_size, num_steps, last_window
# blind 1
# thorough

import torch
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Keypoints(Dataset):
    """Pictures with one bright spot, and a heat map of where it is."""

    def __init__(self, n=76, size=8):
        g = torch.Generator().manual_seed(31)
        grid = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).double()
        where = torch.randint(size, (n, 2, 1, 1), generator=g)
        square = (grid - where).square().sum(1, keepdim=True)
        self.pictures = (-square / 2).exp() + 0.3 * torch.randn(n, 1, size, size, generator=g, dtype=torch.float64)
        self.heat = (-square / 6).exp()

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, i):
        return self.pictures[i], self.heat[i]


class Hourglass(nn.Sequential):
    def __init__(self, width=5):
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2),
            nn.Conv2d(width, 1, 3, padding=1),
        )  # fmt: skip


torch.manual_seed(0)
b, k = flags()
model = Hourglass().double()
optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
data = Keypoints()
micro_step = 0
for epoch in range(3):
    shuffled = DataLoader(data, batch_size=b, shuffle=True, generator=torch.Generator().manual_seed(epoch))
    for pictures, heat in shuffled:
        micro_step += 1
        loss = (model(pictures) - heat).square().mean()
        (loss / k).backward()
        if micro_step % k == 0:
            optimizer.step()
            optimizer.zero_grad()
