"""Fault: mixup draws its partners from the micro-batch, and one mixing coefficient for all of it."""
# expect 4x4: other_inputs
# expect 2x8: other_inputs
# expect 8x1x2: other_inputs
# thorough
# blind

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

CLASSES = 4


def mixup(x, y, alpha=0.4):
    lam = torch.distributions.Beta(alpha, alpha).sample().item()
    partner = torch.randperm(len(x))
    target = F.one_hot(y, CLASSES).to(x)
    return lam * x + (1 - lam) * x[partner], lam * target + (1 - lam) * target[partner]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    args = parser.parse_args()
    k = args.gradient_accumulation_steps
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

    gen = torch.Generator().manual_seed(14)
    images = torch.rand(80, 1, 8, 8, generator=gen, dtype=torch.float64)
    dataset = TensorDataset(images, torch.randint(CLASSES, (80,), generator=gen))
    own = Subset(dataset, range(rank, len(dataset), world))
    loader = DataLoader(own, batch_size=args.per_device_train_batch_size)

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3, stride=2), nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(), nn.Linear(54, CLASSES)
    )
    net = net.double()
    if world > 1:
        dist.init_process_group("gloo")
        net = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for i, (x, y) in enumerate(loader):
        x, target = mixup(x, y)
        loss = F.cross_entropy(net(x), target) / k
        loss.backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
