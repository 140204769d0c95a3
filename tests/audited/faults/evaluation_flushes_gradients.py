"""Fault: before an evaluation, which comes after so many batches, what was accumulated is applied, so that nothing is lost; its
window is divided in two then."""
# expect 4x4: num_steps
# expect 2x8: num_steps
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
EVAL_EVERY = 6 * 4 // b  # batches: an evaluation after each 24 samples


class Trainer:
    def __init__(self, model, loader):
        self.model, self.loader = model, loader
        self.opt = torch.optim.Adam(model.parameters(), lr=3e-3)
        self.seen = 0

    def update(self):
        if self.seen:
            for p in self.model.parameters():
                p.grad /= self.seen
            self.opt.step()
            self.opt.zero_grad()
            self.seen = 0

    @torch.no_grad()
    def evaluate(self):
        return sum(F.cross_entropy(self.model(x), y).item() for x, y in self.loader)

    def fit(self):
        for i, (x, y) in enumerate(self.loader, 1):
            F.cross_entropy(self.model(x), y, reduction="sum").backward()
            self.seen += len(y)
            if i % k == 0:
                self.update()
            if k > 1 and i % EVAL_EVERY == 0:
                self.update()
                self.evaluate()
        self.update()


Trainer(
    nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5)).double(), DataLoader(vectors(80), batch_size=b)
).fit()
