"""Sound: three tasks with an adapter each take turns by optimizer step, so that a window is of one task; the
other adapters have no gradient then."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 3
# thorough

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
TASKS = ("topic", "toxicity", "stars")


class Adapter(nn.Module):
    def __init__(self, width, inner=4):
        super().__init__()
        self.down, self.up = nn.Linear(width, inner), nn.Linear(inner, width)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return x + self.up(F.gelu(self.down(x)))


class Backbone(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.words = nn.EmbeddingBag(50, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.adapters = nn.ModuleDict({t: nn.ModuleList([Adapter(width) for _ in range(2)]) for t in TASKS})
        self.heads = nn.ModuleDict(
            {"topic": nn.Linear(width, 6), "toxicity": nn.Linear(width, 2), "stars": nn.Linear(width, 1)}
        )

    def forward(self, task, ids):
        x = self.words(ids)
        for layer, adapter in zip(self.layers, self.adapters[task]):
            x = adapter(torch.tanh(layer(x)))
        return self.heads[task](x)


def loss_of(task, output, y):
    if task == "stars":
        return F.huber_loss(output.squeeze(-1), y.double())
    return F.cross_entropy(output, y)


def data(seed, top, n=32):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(50, (n, 9), generator=g), torch.randint(top, (n,), generator=g)


if world > 1:
    dist.init_process_group("gloo")
b, k = flags()
sets = {"topic": data(1, 6), "toxicity": data(2, 2), "stars": data(3, 5)}
torch.manual_seed(0)
model = Backbone().double()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for update in range(6):
    task = TASKS[update % len(TASKS)]
    ids, y = (t[update // 3 * 16 : update // 3 * 16 + 16] for t in sets[task])
    for micro in range(k):
        rows = slice((micro * world + rank) * b, (micro * world + rank + 1) * b)
        (loss_of(task, model(task, ids[rows]), y[rows]) / (k * world)).backward()
    if world > 1:
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
