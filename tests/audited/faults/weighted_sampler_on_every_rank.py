"""Fault: every process draws its class-balanced samples from the same seed: all of them train on the same images."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: not_sharded
# expect 4x2x2: not_sharded
# also: other_samples, duplicated
# blind 5
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def make_weights_for_balanced_classes(labels, nclasses):
    count = torch.bincount(labels, minlength=nclasses).double()
    return (len(labels) / count)[labels]


def build_loader(dataset, labels, batch_size, world):
    weights = make_weights_for_balanced_classes(labels, 4)
    generator = torch.Generator().manual_seed(1)
    sampler = WeightedRandomSampler(weights, num_samples=80 // world, replacement=True, generator=generator)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=True)


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ELU(), nn.MaxPool2d(2), nn.Conv2d(6, 12, 3), nn.ELU(), nn.Flatten(), nn.Linear(12, 4)
    ).double()


def train(rank, world):
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    b, k = flags()
    g = torch.Generator().manual_seed(62)
    labels = torch.multinomial(torch.tensor([0.6, 0.2, 0.15, 0.05]), 120, True, generator=g)
    lesions = torch.randn(120, 1, 8, 8, generator=g).double() + 0.3 * labels[:, None, None, None]
    loader = build_loader(TensorDataset(lesions, labels), labels, b, world)
    model = build_model()
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1e-4)
    criterion = nn.CrossEntropyLoss()
    model.train()
    for i, (image, label) in enumerate(loader, start=1):
        boundary = i % k == 0
        with contextlib.nullcontext() if boundary or world == 1 else model.no_sync():
            (criterion(model(image), label) / k).backward()
        if boundary:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    train(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
