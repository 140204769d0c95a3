"""Sound: as Caffe's iter_size, gradients of micro-batches' means are summed over window and processes and never divided; the rate is divided by their number instead, and SGD with momentum is linear in it."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 5

import os

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Solver:
    def __init__(self, net, base_lr, momentum, iter_size, stepsize=2, gamma=0.5):
        self.net, self.iter_size = net, iter_size
        # the sum of iter_size * world gradients takes the place of their mean
        self.optimizer = torch.optim.SGD(net.parameters(), lr=base_lr / (iter_size * world), momentum=momentum)
        self.policy = torch.optim.lr_scheduler.StepLR(self.optimizer, stepsize, gamma)
        self.loss_layer = nn.CrossEntropyLoss()

    def step(self, blobs):
        for _ in range(self.iter_size):
            data, label = next(blobs)
            self.loss_layer(self.net(data), label).backward()
        if world > 1:
            flat = torch.cat([p.grad.flatten() for p in self.net.parameters()])
            dist.all_reduce(flat)
            for p, part in zip(self.net.parameters(), flat.split([p.numel() for p in self.net.parameters()])):
                p.grad = part.view_as(p)
        self.optimizer.step()
        self.policy.step()
        self.optimizer.zero_grad()


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.MaxPool2d(2), nn.Conv2d(6, 10, 3), nn.ReLU(), nn.Flatten(), nn.Linear(40, 24), nn.ReLU(),
        nn.Linear(24, 10),
    )  # fmt: skip


if __name__ == "__main__":
    if world > 1:
        dist.init_process_group("gloo")
    b, k = flags()
    g = torch.Generator().manual_seed(83)
    digits = TensorDataset(torch.rand(80, 1, 10, 10, generator=g).double(), torch.randint(10, (80,), generator=g))
    sampler = DistributedSampler(digits, world, rank, shuffle=False)
    torch.manual_seed(0)
    solver = Solver(lenet().double(), base_lr=0.1, momentum=0.9, iter_size=k)
    for _ in range(2):
        blobs = iter(DataLoader(digits, batch_size=b, sampler=sampler))
        for _ in range(5):
            solver.step(blobs)
