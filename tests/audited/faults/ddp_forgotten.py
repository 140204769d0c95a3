"""Fault: the model is not wrapped in DDP and no gradient is reduced, so each process trains on its own shard
alone."""
# expect 4x4: exact
# expect 8x1x2: not_reduced
# expect 4x2x2: not_reduced
# blind

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def spirals(n=96):
    """Three noisy spiral arms."""
    gen = torch.Generator().manual_seed(31)
    t, noise = torch.rand(2, n, generator=gen, dtype=torch.float64)
    arm = torch.randint(3, (n,), generator=gen)
    angle = 4 * t + 2.1 * arm + 0.1 * noise
    return TensorDataset(torch.stack([t * angle.cos(), t * angle.sin()], 1), arm)


class Runner:
    def __init__(self, batch_size, accumulate):
        self.k, data = accumulate, spirals()
        sampler = DistributedSampler(data, shuffle=False) if dist.is_initialized() else None
        self.loader = DataLoader(data, batch_size, sampler=sampler)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def run(self):
        for i, (x, y) in enumerate(self.loader, 1):
            (nn.functional.cross_entropy(self.model(x), y) / self.k).backward()
            if i % self.k == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
if int(os.environ.get("WORLD_SIZE", 1)) > 1:
    dist.init_process_group(backend="gloo")
Runner(args.per_device_train_batch_size, args.gradient_accumulation_steps).run()
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
