"""Fault: the linear scaling rule takes the batch of one micro-step (of all processes) and forgets the
accumulation: the rate is k times too low."""
# expect 4x4: learning_rate
# expect 2x8: learning_rate
# expect 8x1x2: exact
# expect 4x2x2: learning_rate
# blind 3
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MixerBlock(nn.Module):
    def __init__(self, patches, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens = nn.Sequential(nn.Linear(patches, 8), nn.GELU(), nn.Linear(8, patches))
        self.channels = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, dim=12, classes=5):
        super().__init__()
        self.stem = nn.Conv2d(3, dim, 4, stride=4)
        self.block, self.head = MixerBlock(4, dim), nn.Linear(dim, classes)

    def forward(self, x):
        return self.head(self.block(self.stem(x).flatten(2).transpose(1, 2)).mean(1))


def main():
    b, k = flags()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(4)
    data = TensorDataset(
        torch.randn(80, 3, 8, 8, generator=g, dtype=torch.float64), torch.randint(5, (80,), generator=g)
    )
    torch.manual_seed(42)
    model = Mixer().double()

    lr_base, lr_base_size = 0.2, 16
    global_batch_size = b * world
    lr = lr_base * global_batch_size / lr_base_size

    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=2e-5)
    if world > 1:
        model = DistributedDataParallel(model)
    sampler = DistributedSampler(data, world, rank, shuffle=False)
    loader = DataLoader(data, batch_size=b, sampler=sampler)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    for batch_idx, (image, target) in enumerate(loader):
        need_update = (batch_idx + 1) % k == 0
        has_no_sync = world > 1 and not need_update
        with model.no_sync() if has_no_sync else contextlib.nullcontext():
            loss = loss_fn(model(image), target) / k
            loss.backward()
        if need_update:
            optimizer.step()
            optimizer.zero_grad()


main()
