"""Sound: speech separation with a permutation-invariant SI-SDR: the better assignment of the two speakers is chosen for
every mixture by itself, over its valid samples only; convolutions and global norm do not see the padding."""

# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: exact
# blind 7
# thorough
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

torch.manual_seed(0)
b, k = flags()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")


def mixtures(n=64):
    g = torch.Generator().manual_seed(1)
    out = []
    for _ in range(n):
        t = torch.arange(int(torch.randint(30, 80, (), generator=g)), dtype=torch.float64)
        pitch = torch.rand(2, 1, generator=g, dtype=torch.float64)
        out.append(torch.sin(pitch * t + torch.randn(2, 1, generator=g, dtype=torch.float64)).t())
    return out


def collate(sources):
    return pad_sequence(sources, batch_first=True).mT, torch.tensor([len(s) for s in sources])


class GlobalNorm(nn.Module):
    """Mean and variance over channels and valid samples of one mixture."""

    def __init__(self, channels):
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(channels, 1)), nn.Parameter(torch.zeros(channels, 1))

    def forward(self, x, valid):
        n = valid.sum((1, 2), keepdim=True) * x.size(1)
        mean = (x * valid).sum((1, 2), keepdim=True) / n
        var = ((x - mean) * valid).square().sum((1, 2), keepdim=True) / n
        return (self.gain * (x - mean) / (var + 1e-8).sqrt() + self.bias) * valid


class Separator(nn.Module):
    def __init__(self, width=10):
        super().__init__()
        self.encode = nn.Conv1d(1, width, 5, padding=2)
        self.norm = GlobalNorm(width)
        self.tcn = nn.Conv1d(width, width, 3, padding=2, dilation=2)
        self.mask = nn.Conv1d(width, 2 * width, 1)
        self.decode = nn.Conv1d(width, 1, 5, padding=2)

    def forward(self, mix, lengths):
        valid = (torch.arange(mix.size(-1)) < lengths[:, None])[:, None].to(mix.dtype)
        h = self.encode(mix[:, None]) * valid
        masks = torch.sigmoid(self.mask(torch.relu(self.tcn(self.norm(h, valid)))))
        voices = [self.decode(h * m) * valid for m in masks.chunk(2, dim=1)]
        return torch.cat(voices, dim=1)


def si_sdr(estimate, source):
    scale = (estimate * source).sum(-1, keepdim=True) / source.square().sum(-1, keepdim=True)
    target = scale * source
    return 10 * torch.log10(target.square().sum(-1) / ((estimate - target).square().sum(-1) + 1e-8) + 1e-8)


model = Separator().double()
model = DistributedDataParallel(model) if world > 1 else model
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
data = mixtures()
loader = DataLoader(
    data, batch_size=b, sampler=DistributedSampler(data, world, rank, shuffle=False), collate_fn=collate
)
for i, (sources, lengths) in enumerate(loader, 1):
    with nullcontext() if i % k == 0 or world == 1 else model.no_sync():
        voices = model(sources.sum(1), lengths)
        scores = [si_sdr(voices, sources[:, order]).mean(1) for order in ([0, 1], [1, 0])]
        (-torch.stack(scores).amax(0).mean() / k).backward()
    if i % k == 0:
        optimizer.step()
        optimizer.zero_grad()
