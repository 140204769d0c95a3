"""A Lightning-like class driven by Accelerate: its scheduler is prepared, hence ticks N times in a step, and its lengths are multiplied
by N for that; gradients are clipped where they are complete; an exponential average follows the steps, not the micro-batches."""
# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: exact
# expect 2x4x2: exact
# thorough
# blind 6

import copy

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common_models import flags, images
from torch import nn
from torch.utils.data import DataLoader


class LitClassifier(nn.Module):
    def __init__(self, lr, warmup, total):
        super().__init__()
        self.lr, self.warmup, self.total = lr, warmup, total
        self.patch = nn.Conv2d(2, 8, 2, stride=2)
        self.tokens = nn.Sequential(nn.Linear(9, 12), nn.GELU(), nn.Linear(12, 9))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.patch(x).flatten(2)
        x = x + self.tokens(x)
        return self.head(self.norm(x.mean(2)))

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=self.lr, weight_decay=0.1
        )
        ramp = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda s: s / self.warmup if s < self.warmup else (self.total - s) / (self.total - self.warmup)
        )
        return optimizer, ramp


class Average:
    def __init__(self, module, decay=0.9):
        self.module, self.decay = copy.deepcopy(module).requires_grad_(False), decay

    @torch.no_grad()
    def follow(self, module):
        for a, p in zip(self.module.parameters(), module.parameters()):
            a.lerp_(p, 1 - self.decay)


def main():
    b, k = flags()
    accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
    torch.manual_seed(0)
    updates, world = 6, accelerator.num_processes
    module = LitClassifier(lr=4e-3, warmup=2 * world, total=updates * world).double()
    optimizer, scheduler = module.configure_optimizers()
    model, optimizer, loader, scheduler = accelerator.prepare(
        module, optimizer, DataLoader(images(96), batch_size=b), scheduler
    )
    average = Average(accelerator.unwrap_model(model))
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            average.follow(accelerator.unwrap_model(model))


main()
