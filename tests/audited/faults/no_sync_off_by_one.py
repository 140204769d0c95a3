"""Fault, on several processes only: no_sync is left out at the first micro-batch of a window instead of the last one, so
the gradients of all later ones stay with their process."""
# expect 4x4: exact
# expect 8x1x2: exact
# expect 4x2x2: not_reduced
# expect 2x4x2: not_reduced
# thorough
# blind

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(args):
    distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
    gen = torch.Generator().manual_seed(55)
    tokens = torch.randint(30, (80, 9), generator=gen)
    dataset = TensorDataset(tokens, torch.randint(2, (80,), generator=gen))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 8), nn.Flatten(), nn.Linear(72, 12), nn.ReLU(), nn.Linear(12, 2)).double()
    sampler = None
    if distributed:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
        sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=args.per_device_train_batch_size, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    k = args.gradient_accumulation_steps
    for step, (x, y) in enumerate(loader):
        skip = distributed and step % k != 0
        with model.no_sync() if skip else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(model(x), y) / k
            loss.backward()
        if (step + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
    if distributed:
        dist.barrier()
        dist.destroy_process_group()


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
main(parser.parse_args())
