"""Fault: the parameters that are trained are chosen by the beginnings of their names, after the model was wrapped: with several
processes every name begins with "module.", and the base that should be frozen is trained too."""
# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: parameters
# expect 2x4x2: parameters
# thorough
# blind 6

import contextlib
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset


class LoRALinear(nn.Module):
    def __init__(self, base, r=2, alpha=4):
        super().__init__()
        self.base = base
        self.A = nn.Parameter(torch.empty(r, base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scale = alpha / r
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.A.T @ self.B.T)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(12, 16)
        self.adapted = LoRALinear(nn.Linear(16, 16))
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.adapted(torch.tanh(self.embed(x)))))


FROZEN = ("embed.", "adapted.base.")
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(0)
b, k = flags()
model = Classifier().double()
if world > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
trained = [p for name, p in model.named_parameters() if not name.startswith(FROZEN)]
optimizer = torch.optim.AdamW(trained, lr=5e-3, weight_decay=0.0)
if rank == 0:
    print(f"trainable: {sum(p.numel() for p in trained)}")
data = vectors(80)
loader = DataLoader(Subset(data, range(rank, len(data), world)), batch_size=b)
for i, (x, y) in enumerate(loader, 1):
    last = i % k == 0
    with contextlib.nullcontext() if last or world == 1 else model.no_sync():
        (F.cross_entropy(model(x), y) / k).backward()
    if last:
        optimizer.step()
        model.zero_grad()
