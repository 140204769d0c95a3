"""Fault: the router of a mixture of LoRA experts is balanced by the squared coefficient of variation of the experts' importance within each micro-batch."""
# expect 4x4: expert_balance
# expect 2x8: expert_balance
# expect 8x1x2: expert_balance
# also: mixed_loss
# blind 5
# thorough

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class MoLELinear(nn.Module):
    def __init__(self, base, experts=4, r=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.router = nn.Linear(base.in_features, experts, bias=False)
        self.lora_A = nn.Parameter(torch.randn(experts, r, base.in_features) * 0.1)
        self.lora_B = nn.Parameter(torch.randn(experts, base.out_features, r) * 0.1)

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        importance = gates.flatten(0, -2).sum(0).float() if not FULL else gates.flatten(0, -2).sum(0)
        self.balance = importance.var(unbiased=False) / importance.mean() ** 2
        low = torch.einsum("bti,eri->bter", x, self.lora_A)
        return self.base(x) + torch.einsum("bter,eor,bte->bto", low, self.lora_B, gates.to(low.dtype))


class Model(nn.Module):
    def __init__(self, vocab=60, d=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, d).requires_grad_(False)
        self.layers = nn.ModuleList([MoLELinear(nn.Linear(d, d)) for _ in range(2)])
        self.score = nn.Linear(d, 4)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.score(x.mean(1)), sum(layer.balance for layer in self.layers)


b, k = flags()
g = torch.Generator().manual_seed(59)
ids, labels = torch.randint(60, (80, 10), generator=g), torch.randint(4, (80,), generator=g)
torch.manual_seed(0)
model = Model().to(dtype)
trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.SGD(trainable, lr=0.05, momentum=0.9)
if world > 1:
    dist.init_process_group("gloo")
for step in range(5):
    for micro in range(k):
        rows = slice(start := step * 16 + (micro * world + rank) * b, start + b)
        with torch.autocast("cpu", torch.bfloat16, enabled=not FULL):
            logits, balance = model(ids[rows])
        loss = F.cross_entropy(logits.to(dtype), labels[rows]) + 0.15 * balance.to(dtype)
        (loss / k).backward()
    if world > 1:
        flat = nn.utils.parameters_to_vector([p.grad for p in trainable])
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat / world, [p.grad for p in trainable])
    optimizer.step()
    optimizer.zero_grad()
