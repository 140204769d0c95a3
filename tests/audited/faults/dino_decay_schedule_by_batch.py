"""Fault: the rate is set per update, but the cosine schedule of the weight decay is read by the number of micro-batches: with
accumulation the decay grows k times too fast."""

# expect 4x4: update
# expect 2x8: update
# also: ticks_per_micro_step
# blind 7
# thorough
import math

import torch
import torch.nn.functional as F
from common_models import flags, images
from torch import nn
from torch.utils.data import DataLoader


def cosine_scheduler(base, final, updates, warmup=0, start=0.0):
    ramp = [start + (base - start) * i / max(warmup, 1) for i in range(warmup)]
    n = updates - warmup
    return ramp + [final + 0.5 * (base - final) * (1 + math.cos(math.pi * i / n)) for i in range(n)]


def get_params_groups(model):
    regularized = [p for p in model.parameters() if p.dim() > 1]
    not_regularized = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": regularized}, {"params": not_regularized, "weight_decay": 0.0}]


class PatchEncoder(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.patch = nn.Conv2d(2, dim, 2, stride=2)
        self.mix = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(dim, 5)

    def forward(self, x):
        return self.head(self.mix(self.patch(x).flatten(2).transpose(1, 2)).mean(1))


def train(b, k, epochs=2):
    model = PatchEncoder().double()
    loader = DataLoader(images(64), batch_size=b)
    updates = epochs * (len(loader) // k)
    lr_schedule = cosine_scheduler(2e-2, 1e-3, updates, warmup=2, start=5e-3)
    wd_schedule = cosine_scheduler(0.04, 0.8, updates)
    optimizer = torch.optim.AdamW(get_params_groups(model), lr=lr_schedule[0])
    it = 0
    for epoch in range(epochs):
        for x, y in loader:
            (F.cross_entropy(model(x), y) / k).backward()
            if (it + 1) % k == 0:
                for i, group in enumerate(optimizer.param_groups):
                    group["lr"] = lr_schedule[it // k]
                    if i == 0:  # only the first group is regularized
                        group["weight_decay"] = wd_schedule[min(it, updates - 1)]
                optimizer.step()
                optimizer.zero_grad()
            it += 1


if __name__ == "__main__":
    torch.manual_seed(0)
    train(*flags())
