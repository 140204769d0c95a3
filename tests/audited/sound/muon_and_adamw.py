"""Exact: matrices are trained by an optimizer like Muon and the rest by AdamW, with a schedule each, stepped once per step.
Sums over samples are divided by the step's number of samples on all processes, and gradients are summed by all_reduce."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# expect 2x4x2: exact
# thorough
# blind

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR


def orthogonalized(g, steps=5):
    """Newton-Schulz iteration of Muon."""
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if g.shape[0] > g.shape[1] else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalized(p.grad.lerp(buffer, group["momentum"]))
                p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def main(b, k):
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    gen = torch.Generator().manual_seed(8)
    inputs = torch.randn(77, 14, generator=gen, dtype=torch.float64)
    labels = (inputs[:, :3].sum(1) > 0).long() + 2 * (inputs[:, 3] > 0.5).long()

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(14, 20), nn.LayerNorm(20), nn.GELU(), nn.Linear(20, 20), nn.LayerNorm(20), nn.GELU(), nn.Linear(20, 4)
    ).double()
    hidden = [p for layer in model[:-1] for p in layer.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if not any(p is h for h in hidden)]
    optimizers = [Muon(hidden), torch.optim.AdamW(rest, lr=5e-3, betas=(0.9, 0.95))]
    schedulers = [LambdaLR(optimizers[0], lambda t: min(1, (t + 1) / 4)), CosineAnnealingLR(optimizers[1], T_max=10)]

    for _epoch in range(2):
        for rows in torch.arange(len(inputs)).split(b * k * world):
            for micro in rows[rank::world].split(b):
                loss = F.cross_entropy(model(inputs[micro]), labels[micro], reduction="sum", label_smoothing=0.1)
                (loss / len(rows)).backward()
            if world > 1:
                for p in model.parameters():
                    dist.all_reduce(p.grad)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parsed = parser.parse_args()
    main(parsed.per_device_train_batch_size, parsed.gradient_accumulation_steps)
