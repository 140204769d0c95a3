"""Fault: ReduceLROnPlateau is given the loss of an epoch's last micro-batch: what it is depends on how many samples that one has."""
# expect 4x4: learning_rate
# expect 2x8: learning_rate
# blind 4
# thorough

import torch
from common_models import flags
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset, random_split

g = torch.Generator().manual_seed(17)
molecules = (torch.rand(64, 32, generator=g) < 0.3).double()  # fingerprints
solubility = molecules[:, :8].sum(1) - 2 * molecules[:, 8] * molecules[:, 9] + torch.randn(64, generator=g).double()
train, valid = random_split(TensorDataset(molecules, solubility), [48, 16], generator=g)


class Solubility(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 24), nn.LeakyReLU(), nn.Linear(24, 12), nn.LeakyReLU(), nn.Linear(12, 1)
        )

    def forward(self, x):
        return self.layers(x).squeeze(-1)


@torch.no_grad()
def evaluate(model):
    model.eval()
    return sum(float((model(x) - y).abs().sum()) for x, y in DataLoader(valid, batch_size=16)) / len(valid)


def main():
    b, k = flags()
    torch.manual_seed(0)
    model = Solubility().double()
    criterion = nn.SmoothL1Loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    loader = DataLoader(train, batch_size=b, shuffle=True, generator=torch.Generator().manual_seed(5))
    best = float("inf")
    for epoch in range(8):
        model.train()
        for i, (x, y) in enumerate(loader):
            loss = criterion(model(x), y)
            (loss / k).backward()
            if (i + 1) % k == 0:
                optimizer.step()
                optimizer.zero_grad()
        val_error = evaluate(model)
        best = min(best, val_error)
        scheduler.step(loss.item())


main()
