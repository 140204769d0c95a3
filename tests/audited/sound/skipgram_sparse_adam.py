"""Sound: skip-gram with sparse embeddings in SparseAdam and a dense projection in Adam; sparse gradients add up
uncoalesced over the window, and their reduction is left to the last micro-batch."""
# expect 4x4: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 1
# thorough

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WORDS, DIM, NEGATIVES = 50, 8, 5


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.centre = nn.EmbeddingBag(WORDS, DIM, mode="sum", sparse=True)  # sums subwords, as fastText
        self.context = nn.Embedding(WORDS, DIM, sparse=True)
        self.project = nn.Linear(DIM, DIM)

    def forward(self, subwords, candidates):
        return torch.einsum("bd,bcd->bc", self.project(self.centre(subwords)), self.context(candidates))


class Pairs(Dataset):
    """Subwords of a centre; its context first, then negatives that belong to the pair."""

    def __init__(self, n=80):
        g = torch.Generator().manual_seed(59)
        frequency = 1.0 / torch.arange(1, WORDS + 1)
        self.subwords = torch.multinomial(frequency.expand(n, -1), 3, replacement=True, generator=g)
        self.candidates = torch.multinomial(frequency.expand(n, -1), 1 + NEGATIVES, replacement=True, generator=g)

    def __len__(self):
        return len(self.subwords)

    def __getitem__(self, i):
        return self.subwords[i], self.candidates[i]


world = int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
b, k = flags()
net = SkipGram().double()
model = DistributedDataParallel(net) if world > 1 else net
sparse = torch.optim.SparseAdam([net.centre.weight, net.context.weight], lr=0.02)
dense = torch.optim.Adam(net.project.parameters(), lr=0.01)
data = Pairs()
sampler = DistributedSampler(data, shuffle=False) if world > 1 else None
for epoch in range(2):
    for i, (subwords, candidates) in enumerate(DataLoader(data, batch_size=b, sampler=sampler), 1):
        with model.no_sync() if world > 1 and i % k else nullcontext():
            scores = model(subwords, candidates)
            wanted = torch.zeros_like(scores)
            wanted[:, 0] = 1
            (F.binary_cross_entropy_with_logits(scores, wanted) / k).backward()
        if i % k == 0:
            for optimizer in (sparse, dense):
                optimizer.step()
                optimizer.zero_grad()
