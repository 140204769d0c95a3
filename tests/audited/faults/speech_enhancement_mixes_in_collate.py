"""Fault: the collate function mixes noise into the clean clips at a signal-to-noise ratio drawn for the batch: the same
clips give other inputs in other batches."""

# expect 4x4: random_collate
# expect 2x8: random_collate
# also: other_inputs
# blind 7
# thorough
import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
SAMPLES = 64

g = torch.Generator().manual_seed(1)
t = torch.arange(SAMPLES, dtype=torch.float64)
pitch = torch.rand(64, generator=g, dtype=torch.float64) * 0.5 + 0.1
clean = [torch.sin(p * t) for p in pitch]
noises = torch.randn(20, SAMPLES, generator=g, dtype=torch.float64)


def mix(clip, noise, snr):
    scale = clip.norm() / noise.norm() / 10 ** (snr / 20)
    return clip + scale * noise


def collate_noisy(clips):
    snr = float(torch.randint(-5, 16, ()))
    which = torch.randint(len(noises), (len(clips),))
    noisy = [mix(c, noises[n], snr) for c, n in zip(clips, which)]
    return torch.stack(noisy)[:, None], torch.stack(clips)[:, None]


class Denoiser(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down = nn.Conv1d(1, width, 8, stride=4, padding=2)
        self.mid = nn.Conv1d(width, width, 3, padding=1)
        self.up = nn.ConvTranspose1d(width, 1, 8, stride=4, padding=2)

    def forward(self, x):
        h = F.gelu(self.down(x))
        return x + self.up(h + F.gelu(self.mid(h)))


model = Denoiser().double()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(clean, batch_size=b, shuffle=False, collate_fn=collate_noisy)
for step, (noisy, target) in enumerate(loader, 1):
    loss = F.l1_loss(model(noisy), target)
    (loss / k).backward()
    if step % k == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
