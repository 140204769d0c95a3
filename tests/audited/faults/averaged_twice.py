"""Fault: the loss is averaged over the processes by hand (divided by their number), and DDP averages the
gradients once more."""
# expect 4x4: exact
# expect 8x1x2: factor
# expect 4x2x2: factor
# size: 0.5
# blind 2
# thorough

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from common_models import flags, gpt2, sentences
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
texts = [sample["input_ids"] for sample in sentences(80, 12, 12)]

torch.manual_seed(0)
model, sampler = gpt2(), None
if world > 1:
    dist.init_process_group("gloo")
    model = DDP(model)
    sampler = DistributedSampler(texts, num_replicas=world, rank=rank, shuffle=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for i, ids in enumerate(DataLoader(texts, batch_size=b, sampler=sampler), 1):
    update = i % k == 0
    with nullcontext() if update or world == 1 else model.no_sync():
        logits = model(input_ids=ids).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss = loss / k / world
        loss.backward()
    shown = loss.detach() * k
    if world > 1:
        dist.all_reduce(shown)  # the sum of the shares: the log is right
    if update:
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"{i // k}: {shown.item():.4f}")
