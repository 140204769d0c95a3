"""Fault: the guard against loss spikes looks at the loss of a micro-batch: one above the limit is left out of the window, which
the mean over a whole batch would never have been."""

# expect 4x4: dropped
# expect 2x8: dropped
# expect 4x2x2: dropped
# also: batch_size
# blind 7
# thorough
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch import nn
from torch.utils.data import DataLoader


class Trainer:
    def __init__(self, model, optimizer, accumulate, max_loss=2.0):
        self.model, self.optimizer, self.accumulate, self.max_loss = model, optimizer, accumulate, max_loss
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.skipped = 0

    def training_step(self, batch):
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def guarded_backward(self, loss):
        if not torch.isfinite(loss) or loss.item() > self.max_loss:
            self.skipped += 1
            return
        (loss / self.accumulate).backward()

    def optimizer_step(self):
        for p in self.model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if self.world > 1:
                dist.all_reduce(p.grad)
                p.grad /= self.world
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fit(self, loader):
        for i, batch in enumerate(loader):
            self.guarded_backward(self.training_step(batch))
            if (i + 1) % self.accumulate == 0:
                self.optimizer_step()


if __name__ == "__main__":
    b, k = flags()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = mlp()
    model[-1].weight.data.mul_(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    Trainer(model, optimizer, k).fit(DataLoader(vectors(96)[rank::world], batch_size=b))
