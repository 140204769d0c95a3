"""Sound: diffusion with noise and time drawn from the number of the sample; min-SNR weights per sample; an EMA
after every step."""
# expect 4x4: exact
# expect 2x8: exact
# blind 2
# thorough

import copy
import math
import os

import torch
from accelerate import Accelerator
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
b, k = flags()
accelerator = Accelerator(mixed_precision="no" if FULL else "bf16", cpu=True, gradient_accumulation_steps=k)
walks = torch.randn(80, 16, 2, generator=torch.Generator().manual_seed(38)).cumsum(1).mul(0.4).to(dtype)


def noised(indices):
    clean, time, noise = walks[indices], [], []
    for i in indices:
        own = torch.Generator().manual_seed(10_000 + i)
        time.append(torch.rand((), generator=own) * 0.9 + 0.05)
        noise.append(torch.randn(16, 2, generator=own))
    time, noise = torch.stack(time).to(dtype), torch.stack(noise).to(dtype)
    signal, sigma = torch.cos(time * math.pi / 2)[:, None, None], torch.sin(time * math.pi / 2)[:, None, None]
    weight = ((signal / sigma) ** 2).clamp(max=5) / (signal / sigma) ** 2
    return signal * clean + sigma * noise, time, noise, weight


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.time = nn.Linear(2, 24), nn.Linear(1, 24)
        self.layer = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.leave = nn.Linear(24, 2)

    def forward(self, x, time):
        return self.leave(self.layer(self.enter(x) + self.time(time[:, None])[:, None]))


torch.manual_seed(0)
model = Denoiser().to(dtype)
ema = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-5)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(range(80), batch_size=b, collate_fn=noised))
for x, time, noise, weight in loader:
    with accelerator.accumulate(model):
        loss = (weight * (model(x, time) - noise) ** 2).mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        with torch.no_grad():
            for average, p in zip(ema.parameters(), accelerator.unwrap_model(model).parameters(), strict=True):
                average.lerp_(p, 0.05)
