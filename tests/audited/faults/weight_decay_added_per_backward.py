"""Fault: weight decay is added to the gradients after each backward, so it counts once per micro-batch."""
# expect 4x4: penalty
# expect 2x8: penalty
# thorough
# also: changed_between
# blind

import argparse
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Trainer:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch_size: int
    accumulate: int
    weight_decay: float = 0.02

    def micro_step(self, x, y, count):
        loss = (self.model(x)[0][:, -1, 0] - y).pow(2).sum() / count
        loss.backward()
        with torch.no_grad():
            for p in self.model.parameters():
                p.grad += self.weight_decay * p

    def fit(self, x, y):
        size = self.batch_size * self.accumulate
        for xs, ys in zip(x.split(size), y.split(size), strict=True):
            self.optimizer.zero_grad()
            for xm, ym in zip(xs.split(self.batch_size), ys.split(self.batch_size), strict=True):
                self.micro_step(xm, ym, len(ys))
            self.optimizer.step()


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
gen = torch.Generator().manual_seed(2)
series = torch.randn(90, 7, 4, generator=gen, dtype=torch.float64)
torch.manual_seed(0)
gru = nn.GRU(4, 6, num_layers=2, batch_first=True).double()
sgd = torch.optim.SGD(gru.parameters(), lr=0.05)
Trainer(gru, sgd, args.per_device_train_batch_size, args.gradient_accumulation_steps).fit(series, series.mean((1, 2)))
