"""Sound: a class-balanced sampler draws with replacement, from the seed of the epoch, the same list on every process, of which each takes its own part."""
# expect 4x4: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 5
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class DistributedBalancedSampler(Sampler):
    def __init__(self, labels, num_samples):
        self.weights = 1.0 / torch.bincount(labels).double()[labels]
        self.num_samples, self.epoch = num_samples, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        g = torch.Generator().manual_seed(100 + self.epoch)
        drawn = torch.multinomial(self.weights, self.num_samples, replacement=True, generator=g)
        return iter(drawn[rank::world].tolist())

    def __len__(self):
        return self.num_samples // world


class FocalLoss(nn.Module):
    def forward(self, logits, target, gamma=2.0):
        ce = nn.functional.cross_entropy(logits, target, reduction="none")
        return ((1 - torch.exp(-ce)) ** gamma * ce).mean()


def main():
    b, k = flags()
    g = torch.Generator().manual_seed(81)
    grade = torch.multinomial(torch.tensor([0.7, 0.1, 0.1, 0.07, 0.03]), 150, True, generator=g)
    retina = torch.randn(150, 3, 9, 9, generator=g).double() + 0.2 * grade[:, None, None, None]
    sampler = DistributedBalancedSampler(grade, num_samples=48)
    loader = DataLoader(TensorDataset(retina, grade), batch_size=b, sampler=sampler)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.GELU(), nn.Conv2d(8, 16, 3), nn.GELU(), nn.Flatten(), nn.Linear(64, 5)
    ).double()
    if world > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    criterion = FocalLoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader, 1):
            with contextlib.nullcontext() if i % k == 0 or world == 1 else model.no_sync():
                (criterion(model(x), y) / k).backward()
            if i % k == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


main()
