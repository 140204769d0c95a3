"""Fault: LoRA layers are put into the model after DistributedDataParallel has registered its parameters: their gradients are not reduced."""
# expect 4x4: exact
# expect 8x1x2: not_reduced
# expect 4x2x2: not_reduced
# blind 5
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        self.base, self.scaling = base, alpha / r
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features, dtype=torch.float64) * 0.1)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r, dtype=torch.float64))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scaling


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.query, self.value = nn.Linear(12, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.head = nn.Linear(24, 5)

    def forward(self, x):  # x: batch, patches, 12
        x = torch.tanh(self.embed(x))
        attention = (self.query(x) @ x.transpose(1, 2) / 24**0.5).softmax(-1)
        return self.head((attention @ self.value(x)).mean(1))


def inject_lora(model, targets=("query", "value")):
    model = model.module if hasattr(model, "module") else model
    for name in targets:
        setattr(model, name, LoRALinear(getattr(model, name)))


b, k = flags()
torch.manual_seed(0)
model = Backbone().double()
for name, p in model.named_parameters():
    p.requires_grad = name.startswith("head")
if world > 1:
    dist.init_process_group("gloo")
    model = DDP(model)
inject_lora(model)
params = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(params, lr=5e-3, eps=1e-4)

g = torch.Generator().manual_seed(61)
patches, labels = torch.randn(80, 6, 12, generator=g, dtype=torch.float64), torch.randint(5, (80,), generator=g)
for step in range(5):
    for micro in range(k):
        start = step * 16 + (micro * world + rank) * b
        with model.no_sync() if world > 1 and micro < k - 1 else contextlib.nullcontext():
            loss = F.cross_entropy(model(patches[start : start + b]), labels[start : start + b])
            (loss / k).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
