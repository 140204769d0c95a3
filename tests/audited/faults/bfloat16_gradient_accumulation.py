"""Fault: the model is in bfloat16, so the gradients of the micro-batches are added up in bfloat16."""
# expect 4x4: low_precision
# expect 2x8: low_precision
# thorough
# blind

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    return parser.parse_args()


def windows(x, y, size):
    for start in range(0, len(x), size):
        yield x[start : start + size], y[start : start + size]


def train(args):
    g = torch.Generator().manual_seed(12)
    x = torch.randn(77, 16, generator=g).bfloat16()
    y = torch.randint(8, (77,), generator=g)
    torch.manual_seed(0)
    model = nn.Sequential(Residual(16), Residual(16), nn.Linear(16, 8)).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps
    for _ in range(4):
        for xs, ys in windows(x, y, b * k):
            for xm, ym in windows(xs, ys, b):
                loss = F.cross_entropy(model(xm).float(), ym, reduction="sum") / len(ys)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()


train(parse())
