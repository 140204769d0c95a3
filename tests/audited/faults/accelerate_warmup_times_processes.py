"""Fault: the schedule's lengths are multiplied by the number of processes, as for a prepared scheduler, but this one is not prepared
and ticks once per step: with several processes the warmup takes longer."""
# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: learning_rate
# expect 2x4x2: learning_rate
# thorough
# blind 6

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common_models import flags, vectors
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader


class GatedResidual(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.value, self.gate = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        h = self.norm(x)
        return x + self.value(h) * self.gate(h).sigmoid()


def linear_schedule(optimizer, warmup, total):
    def rate(step):
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return max(0.0, (total - step) / max(1, total - warmup))

    return LambdaLR(optimizer, rate)


def main():
    b, k = flags()
    accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), GatedResidual(16), GatedResidual(16), nn.Linear(16, 5)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = DataLoader(vectors(96), batch_size=b)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = len(loader) // k
    scheduler = linear_schedule(
        optimizer.optimizer, warmup=2 * accelerator.num_processes, total=(steps + 1) * accelerator.num_processes
    )
    model.train()
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()


main()
