"""Fault: where the batches end within a window, the trainer starts the loader again to fill it: in the last step of an epoch the
first samples of the epoch are used a second time."""
# expect 4x4: duplicated
# expect 2x8: duplicated
# also: batch_size
# blind 6

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 16), nn.ELU(), nn.Linear(16, 5))

    def training_step(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y, reduction="sum"), len(y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.5)


class FetchWindows:
    def __init__(self, loader, accumulate):
        self.loader, self.accumulate = loader, accumulate

    def __iter__(self):
        it, done = iter(self.loader), 0
        while done < len(self.loader):
            window = []
            while len(window) < self.accumulate:
                try:
                    window.append(next(it))
                except StopIteration:
                    it = iter(self.loader)
                    continue
                done += 1
            yield window


class Trainer:
    def __init__(self, max_epochs, accumulate_grad_batches):
        self.max_epochs, self.accumulate = max_epochs, accumulate_grad_batches

    def fit(self, module, loader):
        optimizer = module.configure_optimizers()
        for _ in range(self.max_epochs):
            for window in FetchWindows(loader, self.accumulate):
                total = 0
                for batch in window:
                    loss, n = module.training_step(batch)
                    loss.backward()
                    total += n
                for p in module.parameters():
                    p.grad.div_(total)
                optimizer.step()
                optimizer.zero_grad()


torch.manual_seed(0)
b, k = flags()
Trainer(max_epochs=2, accumulate_grad_batches=k).fit(Module().double(), DataLoader(vectors(56), batch_size=b))
