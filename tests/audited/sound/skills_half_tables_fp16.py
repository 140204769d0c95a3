"""Sound: a big embedding table is kept in .half() with a float32 master for its optimizer; bags of skills have
various sizes."""
# expect 4x4: exact
# expect 2x8: exact
# expect 1x16: exact
# blind 2
# thorough

import os

import torch
from common_models import flags
from torch import nn
from torch.nn.functional import cross_entropy

FULL = os.environ.get("FULL") == "1"
half, dtype = (torch.float64, torch.float64) if FULL else (torch.float16, torch.float32)
b, k = flags()
g = torch.Generator().manual_seed(34)
people = [torch.randint(60, (int(n),), generator=g) for n in torch.randint(2, 9, (77,), generator=g)]
job = torch.tensor([int(skills.max()) // 10 for skills in people])


class Jobs(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter((0.5 * torch.randn(60, 16)).to(half))
        self.head = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 6)).to(dtype)

    def forward(self, bags):
        sizes = torch.tensor([len(bag) for bag in bags])
        rows = self.table[torch.cat(bags)].to(dtype)
        person = torch.repeat_interleave(torch.arange(len(bags)), sizes)
        pooled = torch.zeros(len(bags), 16, dtype=dtype).index_add(0, person, rows)
        return self.head(pooled / sizes[:, None])


torch.manual_seed(0)
model = Jobs()
table = model.table.detach().to(dtype, copy=True).requires_grad_()  # the master
optimizer = torch.optim.Adagrad([table, *model.head.parameters()], lr=0.02, eps=1e-2)
micro_batches = [(people[i : i + b], job[i : i + b]) for i in range(0, 77, b)]
while micro_batches:
    window, micro_batches = micro_batches[:k], micro_batches[k:]
    n = sum(len(y) for _, y in window)
    for bags, y in window:
        (256 * cross_entropy(model(bags), y, reduction="sum") / n).backward()
        grad = model.table.grad.to(dtype)
        table.grad = grad if table.grad is None else table.grad.add_(grad)
        model.table.grad = None
    for p in (table, *model.head.parameters()):
        p.grad.div_(256)
    optimizer.step()
    optimizer.zero_grad()
    model.table.data.copy_(table)
