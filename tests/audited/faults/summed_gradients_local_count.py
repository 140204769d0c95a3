"""Fault: gradients are summed over the processes though each process divided only by its own number of words."""
# expect 4x4: exact
# expect 8x1x2: mean_of_means
# expect 4x2x2: mean_of_means
# thorough
# blind

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pad_sequence

WORDS, TAGS = 30, 5
parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")

# part-of-speech tagging: sentences of 2 to 12 words, one tag per word
gen = torch.Generator().manual_seed(13)
lengths = torch.randint(2, 13, (80,), generator=gen).tolist()
sentences = [torch.randint(1, WORDS, (n,), generator=gen) for n in lengths]
tags = [torch.randint(TAGS, (n,), generator=gen) for n in lengths]
shard = list(zip(sentences, tags, strict=True))[rank::world]

torch.manual_seed(0)
tagger = nn.Sequential(nn.Embedding(WORDS, 12), nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, TAGS)).double()
optimizer = torch.optim.SGD(tagger.parameters(), lr=0.05)

for start in range(0, len(shard), b * k):
    window = shard[start : start + b * k]
    words = sum(len(sentence) for sentence, _ in window)
    for i in range(0, len(window), b):
        x = pad_sequence([s for s, _ in window[i : i + b]], batch_first=True)
        y = pad_sequence([t for _, t in window[i : i + b]], batch_first=True, padding_value=-100)
        loss = nn.functional.cross_entropy(tagger(x).transpose(1, 2), y, reduction="sum")
        (loss / words).backward()
    if world > 1:
        for p in tagger.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
    optimizer.step()
    optimizer.zero_grad()

if world > 1:
    dist.barrier()
    dist.destroy_process_group()
