"""Sound: mixup whose partner and ratio are drawn in the dataset from the index and the epoch, so a sample is mixed with the same
other one in every layout; DistributedSampler, DDP and no_sync."""

# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 7
# thorough
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, images
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class MixupDataset(Dataset):
    def __init__(self, samples, classes=5, alpha=0.4):
        self.samples, self.classes, self.epoch = samples, classes, 0
        self.ratio = torch.distributions.Beta(alpha, alpha)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.epoch * len(self) + i)
        (x, y), (x2, y2) = self.samples[i], self.samples[int(torch.randint(len(self), (), generator=g))]
        lam = torch.rand((), generator=g, dtype=torch.float64) ** 2
        if torch.rand((), generator=g) < 0.5:
            x = x.flip(-1)
        soft = lam * F.one_hot(y2, self.classes) + (1 - lam) * F.one_hot(y, self.classes)
        return (1 - lam) * x + lam * x2, soft


def main(epochs=2):
    b, k = flags()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(288, 5)).double()
    if world > 1:
        model = DistributedDataParallel(model)
    dataset = MixupDataset(images(64))
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=True, seed=3)
    loader = DataLoader(dataset, batch_size=b, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader) // k)
    for epoch in range(epochs):
        dataset.epoch = epoch
        sampler.set_epoch(epoch)
        for i, (x, soft) in enumerate(loader):
            last = (i + 1) % k == 0
            with contextlib.nullcontext() if last or world == 1 else model.no_sync():
                (F.cross_entropy(model(x), soft) / k).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()


if __name__ == "__main__":
    main()
