"""Fault: the pairs of all processes are compared, but the embeddings of the other processes come without a
gradient."""
# expect 8x1x2: gathered_without_gradient

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
b = args.per_device_train_batch_size
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
tower = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
model = DistributedDataParallel(tower) if world > 1 else tower
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
pairs = torch.randn(80, 2, 6, generator=torch.Generator().manual_seed(1))


def gather(mine):
    if world == 1:
        return mine
    everyone = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everyone, mine)
    return torch.cat(everyone)  # as of accelerator.gather: no graph leads back


for start in range(rank * b, 80, b * world):
    embeddings = F.normalize(model(pairs[start : start + b].flatten(0, 1)), dim=-1).view(-1, 2, 4)
    all_images, all_texts = gather(embeddings).unbind(1)
    truth = torch.arange(rank * b, rank * b + len(embeddings))
    image_loss = F.cross_entropy(embeddings[:, 0] @ all_texts.T / 0.1, truth)
    loss = (image_loss + F.cross_entropy(embeddings[:, 1] @ all_images.T / 0.1, truth)) / 2
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

if world > 1:
    dist.destroy_process_group()
