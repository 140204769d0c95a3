"""Fault: early stopping looks at the loss of every micro-batch, and its patience is counted in them: smaller micro-batches, which are more of them and noisier, stop the training after fewer steps."""
# expect 4x4: num_steps
# expect 2x8: num_steps
# blind 5
# thorough

import torch
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class EarlyStopping:
    def __init__(self, patience=9, min_delta=0.0):
        self.patience, self.min_delta = patience, min_delta
        self.counter, self.best, self.early_stop = 0, float("inf"), False

    def __call__(self, loss):
        if loss < self.best - self.min_delta:
            self.best, self.counter = loss, 0
        else:
            self.counter += 1
            self.early_stop = self.counter >= self.patience


class Autoencoder(nn.Module):
    def __init__(self, features=16, code=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, 24), nn.ReLU(), nn.Linear(24, code))
        self.decoder = nn.Sequential(nn.Linear(code, 24), nn.ReLU(), nn.Linear(24, features))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def train(model, loader, optimizer, criterion, epochs, accumulation_steps):
    early_stopping = EarlyStopping()
    for epoch in range(1, epochs + 1):
        for i, (x,) in enumerate(loader, 1):
            loss = criterion(model(x), x)
            (loss / accumulation_steps).backward()
            early_stopping(loss.item())
            if i % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
                if early_stopping.early_stop:
                    print(f"Early stopping in epoch {epoch}")
                    return


b, k = flags()
g = torch.Generator().manual_seed(65)
sensors = torch.randn(80, 4, generator=g) @ torch.randn(4, 16, generator=g) + 0.2 * torch.randn(80, 16, generator=g)
torch.manual_seed(0)
model = Autoencoder().double()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
loader = DataLoader(TensorDataset(sensors.double()), batch_size=b)
train(model, loader, optimizer, nn.MSELoss(), 6, k)
