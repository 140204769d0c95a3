"""Sound: hooks centralize the gradient of every micro-batch, and hold the rows of the padding word at 0; both are linear, so it is the same as for the sum."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 5
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class TextCNN(nn.Module):
    def __init__(self, vocab=50, dim=10, classes=4):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.convs = nn.ModuleList([nn.Conv1d(dim, 8, width) for width in (2, 3, 4)])
        self.fc = nn.Linear(24, classes)

    def forward(self, ids):
        x = self.embedding(ids).transpose(1, 2)
        return self.fc(torch.cat([F.relu(conv(x)).amax(2) for conv in self.convs], 1))


def centralize(grad):
    return grad - grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True)


def keep_padding(grad):
    grad = grad.clone()
    grad[0] = 0
    return grad


def add_hooks(model):
    for name, p in model.named_parameters():
        if "embedding" in name:
            p.register_hook(keep_padding)
        elif p.dim() > 1:
            p.register_hook(centralize)


def main():
    b, k = flags()
    g = torch.Generator().manual_seed(72)
    titles = torch.randint(1, 50, (77, 14), generator=g)
    titles[torch.arange(14) >= torch.randint(6, 15, (77, 1), generator=g)] = 0  # all of one width
    topics = torch.randint(4, (77,), generator=g)
    torch.manual_seed(0)
    model = TextCNN().double()
    add_hooks(model)
    if world > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5)
    for step in range(5):
        size = min(16, 77 - step * 16)
        for micro in range(k):
            start = step * 16 + (micro * world + rank) * b
            rows = slice(start, max(start, min(start + b, 77)))
            with contextlib.nullcontext() if micro == k - 1 or world == 1 else model.no_sync():
                loss = F.cross_entropy(model(titles[rows]), topics[rows], reduction="sum") * world / size
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
