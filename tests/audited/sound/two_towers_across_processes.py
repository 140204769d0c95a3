"""Exact: two towers are trained with a contrastive loss over the pairs of all processes by gradient caching.
Embeddings are gathered without a graph, and each process sends the gradients of its own through its towers in chunks.
The temperature is not reduced, because every process computes the whole loss."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# expect 2x4x2: exact
# blind

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")


class Tower(nn.Module):
    """Mean of the word vectors, then a projection to the sphere."""

    def __init__(self, words=60, width=16, out=8):
        super().__init__()
        self.words = nn.EmbeddingBag(words, width, mode="mean")
        self.project = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out))

    def forward(self, texts):
        offsets = torch.tensor([0] + [len(t) for t in texts[:-1]]).cumsum(0)
        return F.normalize(self.project(self.words(torch.cat(texts), offsets)), dim=-1)


def gathered(mine):
    if world == 1:
        return mine.clone()
    everyone = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everyone, mine)
    return torch.cat(everyone)


def texts(num, low, high, seed):
    gen = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (num,), generator=gen).tolist()
    return [torch.randint(60, (n,), generator=gen) for n in lengths]


queries, documents = texts(80, 2, 6, seed=1), texts(80, 6, 20, seed=2)
torch.manual_seed(0)
towers = nn.ModuleDict({"query": Tower(), "document": Tower()}).double()
log_scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
optimizer = torch.optim.Adam([*towers.parameters(), log_scale], lr=0.01)

for start in range(rank * b * k, 80, b * k * world):
    mine = {"query": queries[start : start + b * k], "document": documents[start : start + b * k]}
    with torch.no_grad():
        cached = {
            side: gathered(torch.cat([towers[side](own[j : j + b]) for j in range(0, len(own), b)]))
            for side, own in mine.items()
        }
    for embeddings in cached.values():
        embeddings.requires_grad_()
    scores = log_scale.exp() * cached["query"] @ cached["document"].T
    truth = torch.arange(len(scores))
    loss = (F.cross_entropy(scores, truth) + F.cross_entropy(scores.T, truth)) / 2
    loss.backward()
    for side, own in mine.items():
        wanted = cached[side].grad[rank * b * k : (rank + 1) * b * k]
        for j in range(0, len(own), b):
            surrogate = (towers[side](own[j : j + b]) * wanted[j : j + b]).sum()
            surrogate.backward()
    if world > 1:
        for p in towers.parameters():
            dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()

if world > 1:
    dist.barrier()
    dist.destroy_process_group()
