"""Fault: class-balanced weights (effective numbers of samples) come from the classes of the micro-batch of each process, not from those of the data: the loss is no sum over samples."""
# expect 4x4: mixed_loss
# expect 2x8: mixed_loss
# expect 8x1x2: mixed_loss
# also: not_summed
# blind 5
# thorough

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
CLASSES = 5


class ClassBalancedLoss(nn.Module):
    """Cui et al. 2019; the weights of a batch have a mean of 1."""

    def __init__(self, beta=0.2):
        super().__init__()
        self.beta = beta

    def forward(self, logits, labels):
        counts = torch.bincount(labels, minlength=CLASSES).to(logits)
        weights = (1 - self.beta) / (1 - self.beta ** counts.clamp(min=1))
        weights = weights[labels]
        return (weights / weights.mean() * F.cross_entropy(logits, labels, reduction="none")).mean()


class CommentModel(nn.Module):
    def __init__(self, vocab=120, dim=24):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.conv = nn.Conv1d(dim, 32, 3, padding=1)
        self.linear, self.out = nn.Linear(32, 32), nn.Linear(32, CLASSES)

    def forward(self, tokens):
        hidden = torch.relu(self.conv(self.embedding(tokens).transpose(1, 2))).mean(2)
        return self.out(hidden + torch.relu(self.linear(hidden)))


def run(rank, world):
    b, k = flags()
    g = torch.Generator().manual_seed(57)
    labels = torch.multinomial(torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]), 80, True, generator=g)
    data = TensorDataset((torch.randint(120, (80, 16), generator=g) + labels[:, None]) % 120, labels)
    torch.manual_seed(1234)
    model = CommentModel().to(dtype)
    if world > 1:
        dist.init_process_group("gloo")
        model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    criterion = ClassBalancedLoss()
    for i, (tokens, label) in enumerate(
        DataLoader(data, b, sampler=DistributedSampler(data, world, rank, shuffle=False)), 1
    ):
        if world > 1:
            model.require_backward_grad_sync = i % k == 0
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not FULL):
            logits = model(tokens)
        (criterion(logits.to(dtype), label) / k).backward()
        if i % k == 0:
            optimizer.step()
            optimizer.zero_grad()


run(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
