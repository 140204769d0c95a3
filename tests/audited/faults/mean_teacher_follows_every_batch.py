"""Fault: the teacher, whose outputs enter the loss, follows the student after every micro-batch, not once per
step."""
# expect 4x4: average
# expect 2x8: average
# expect 8x1x2: exact
# thorough
# blind

import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MOMENTUM = 0.8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 24), nn.Tanh())
        self.head = nn.Linear(24, 3)

    def forward(self, x):
        return self.head(self.body(x))


@torch.no_grad()
def follow(teacher, student):
    for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
        t.mul_(MOMENTUM).add_(s, alpha=1 - MOMENTUM)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    args = parser.parse_args()
    b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    gen = torch.Generator().manual_seed(5)
    x = torch.randn(96, 8, generator=gen, dtype=torch.float64)
    noisy = x + 0.1 * torch.randn(96, 8, generator=gen, dtype=torch.float64)
    y = torch.randint(3, (96,), generator=gen)

    torch.manual_seed(0)
    student = Net().double()
    teacher = copy.deepcopy(student).requires_grad_(False)
    model = student
    if world > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(student)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for i, rows in enumerate(torch.arange(96)[rank::world].split(b), 1):
        prediction = model(noisy[rows])
        consistency = (prediction.softmax(1) - teacher(x[rows]).softmax(1)).square().sum()
        loss = F.cross_entropy(prediction, y[rows], reduction="sum") + 5 * consistency
        (loss / (b * k)).backward()
        if i % k == 0:
            optimizer.step()
            optimizer.zero_grad()
        follow(teacher, student)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


main()
