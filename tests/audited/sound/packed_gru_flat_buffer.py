"""Exact: gradients of a GRU on packed sequences are asked for with torch.autograd.grad and added up in one flat buffer.
Its last entry counts the tokens, so one all_reduce sums both, and the division comes after it."""
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
from torch import nn
from torch.nn.utils import clip_grad_norm_, rnn


class Forecaster(nn.Module):
    """Predicts the next reading of two sensors at every time."""

    def __init__(self, width=12):
        super().__init__()
        self.gru = nn.GRU(2, width, num_layers=2, batch_first=True)
        self.out = nn.Linear(width, 2)

    def forward(self, series):
        seen = rnn.pack_sequence([s[:-1] for s in series], enforce_sorted=False)
        wanted = rnn.pack_sequence([s[1:] for s in series], enforce_sorted=False)
        states, _ = self.gru(seen)
        return (self.out(states.data) - wanted.data).square().sum(), len(wanted.data)


def flat_step(model, micro_batches, world):
    """Sets every p.grad to the gradient of the mean over all tokens of all processes."""
    parameters = list(model.parameters())
    buffer = torch.zeros(sum(p.numel() for p in parameters) + 1, dtype=torch.float64)
    for series in micro_batches:
        loss, tokens = model(series)
        grads = torch.autograd.grad(loss, parameters)
        buffer[:-1] += torch.cat([g.reshape(-1) for g in grads])
        buffer[-1] += tokens
    if world > 1:
        dist.all_reduce(buffer)
    mean = buffer[:-1] / buffer[-1]
    for p, g in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
        p.grad = g.view_as(p)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    a = parser.parse_args()
    b, k = a.per_device_train_batch_size, a.gradient_accumulation_steps
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    gen = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, 16, (77,), generator=gen).tolist()
    data = [torch.randn(n, 2, generator=gen, dtype=torch.float64).cumsum(0) / 3 for n in lengths]
    torch.manual_seed(0)
    model = Forecaster().double()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)
    for start in range(0, len(data), b * k * world):
        mine = data[start : start + b * k * world][rank::world]
        flat_step(model, [mine[j : j + b] for j in range(0, len(mine), b)], world)
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
