"""Fault: every process scores its own images against the texts of all processes (local loss), but the texts are gathered
without a gradient, so they never learn from the images of other processes (nor from their own)."""

# expect 4x4: exact
# expect 8x1x2: gathered_without_gradient
# expect 4x2x2: gathered_without_gradient
# blind 7
# thorough
# open
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader


class ClipLoss:
    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size

    def gather_features(self, features):
        gathered = [torch.zeros_like(features) for _ in range(self.world_size)]
        dist.all_gather(gathered, features.detach())
        return torch.cat(gathered)

    def __call__(self, image, text, scale=8.0):
        if self.world_size > 1:
            all_image, all_text = self.gather_features(image), self.gather_features(text)
        else:
            all_image, all_text = image, text
        labels = torch.arange(len(image)) + len(image) * self.rank
        per_image, per_text = scale * image @ all_text.T, scale * text @ all_image.T
        return (F.cross_entropy(per_image, labels) + F.cross_entropy(per_text, labels)) / 2


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 8))
        self.textual = nn.Sequential(nn.Linear(7, 24), nn.GELU(), nn.Linear(24, 8))

    def forward(self, image, text):
        return F.normalize(self.visual(image), dim=-1), F.normalize(self.textual(text), dim=-1)


def train_one_epoch(model, loader, loss_fn, optimizer, accum_freq, world_size):
    kept, cached = [], []
    for batch in loader:
        with torch.no_grad():
            kept.append(batch)
            cached.append(model(*batch))
        if len(kept) < accum_freq:
            continue
        optimizer.zero_grad()
        for j, inputs in enumerate(
            kept
        ):  # the features of micro-batch j with a gradient, all the others from the cache
            features = [*cached[:j], model(*inputs), *cached[j + 1 :]]
            image, text = (torch.cat(f) for f in zip(*features))
            loss_fn(image, text).backward()
        if world_size > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world_size
        optimizer.step()
        kept, cached = [], []


if __name__ == "__main__":
    b, k = flags()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = CLIP().double()
    mix = torch.randn(12, 7, dtype=torch.float64)
    pairs = [(x, (x @ mix).tanh()) for x, _ in vectors(80)]
    loader = DataLoader(pairs[rank::world_size], batch_size=b)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)
    train_one_epoch(model, loader, ClipLoss(rank, world_size), optimizer, k, world_size)
