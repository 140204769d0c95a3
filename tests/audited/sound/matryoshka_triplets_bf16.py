"""Sound: given triplets (no negatives from the batch), the margin loss of several prefixes of the embedding: a
mean over triplets, equal in all micro-batches."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 3
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class SentenceEncoder(nn.Module):
    def __init__(self, vocabulary=60, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=0)
        self.dense = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, ids):
        mask = (ids != 0)[..., None]
        x = self.dense(self.embed(ids))
        return (x * mask).sum(1) / mask.sum(1)


class MatryoshkaLoss(nn.Module):
    def __init__(self, dims=(32, 16, 8), weights=(1.0, 0.5, 0.25), margin=1.0):
        super().__init__()
        self.dims, self.weights, self.margin = dims, weights, margin

    def forward(self, anchor, positive, negative):
        total = 0
        for dim, weight in zip(self.dims, self.weights):
            a, p, n = (F.normalize(e[:, :dim], dim=-1) for e in (anchor, positive, negative))
            near, far = 1 - (a * p).sum(-1), 1 - (a * n).sum(-1)
            total = total + weight * F.softplus(5 * (near - far + self.margin)).mean()
        return total


def triplets(n=80):
    g = torch.Generator().manual_seed(24)
    return [
        [torch.randint(1, 60, (int(torch.randint(4, 12, (), generator=g)),), generator=g) for _ in range(3)]
        for _ in range(n)
    ]


def collate(rows):
    """All texts of the micro-batch in one padded tensor: anchors, positives, negatives."""
    return pad_sequence([text for column in zip(*rows) for text in column], batch_first=True)


b, k = flags()
torch.manual_seed(0)
model, criterion, data = SentenceEncoder().to(dtype), MatryoshkaLoss(), triplets()
if world > 1:
    dist.init_process_group("gloo")
    model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(data, b, sampler=DistributedSampler(data, world, rank, shuffle=False), collate_fn=collate)
for i, ids in enumerate(loader, 1):
    with contextlib.nullcontext() if i % k == 0 or world == 1 else model.no_sync():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not FULL):
            embeddings = model(ids)
        (criterion(*embeddings.to(dtype).chunk(3)) / k).backward()
    if i % k == 0:
        optimizer.step()
        optimizer.zero_grad()
