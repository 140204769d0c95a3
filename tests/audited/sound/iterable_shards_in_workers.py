"""Exact: an IterableDataset deals its documents to processes and to their loader workers; DDP with no_sync.
Sums are multiplied by N and divided by the tokens of the step, counted on all processes before the first backward."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# expect 2x4x2: exact
# thorough
# blind

import argparse
import itertools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

VOCAB = 48


class Documents(IterableDataset):
    def __init__(self, num, rank, world):
        self.num, self.rank, self.world = num, rank, world

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        shard = self.rank + self.world * worker
        for i in range(shard, self.num, self.world * workers):
            gen = torch.Generator().manual_seed(1000 + i)
            length = int(torch.randint(3, 14, (), generator=gen))
            yield torch.randint(1, VOCAB, (length,), generator=gen)


class CausalConv(nn.Module):
    """Next-token model that sees the last three tokens."""

    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width, padding_idx=0)
        self.conv = nn.Conv1d(width, width, 3)
        self.out = nn.Linear(width, VOCAB)

    def forward(self, ids):
        x = F.pad(self.embed(ids).transpose(1, 2), (2, 0))
        return self.out(torch.relu(self.conv(x)).transpose(1, 2))


def pad(documents):
    ids = nn.utils.rnn.pad_sequence(documents, batch_first=True)
    return ids[:, :-1], ids[:, 1:]


p = argparse.ArgumentParser()
p.add_argument("--per_device_train_batch_size", type=int, default=16)
p.add_argument("--gradient_accumulation_steps", type=int, default=1)
a = p.parse_args()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = CausalConv().double()
if world > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(Documents(77, rank, world), batch_size=a.per_device_train_batch_size, num_workers=1, collate_fn=pad)
batches = iter(loader)
while window := list(itertools.islice(batches, a.gradient_accumulation_steps)):
    tokens = torch.tensor(sum(int((labels != 0).sum()) for _, labels in window))
    if world > 1:
        dist.all_reduce(tokens)
    for j, (ids, labels) in enumerate(window, 1):
        if world > 1:
            model.require_backward_grad_sync = j == len(window)
        total = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=0, reduction="sum")
        (total * world / tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
