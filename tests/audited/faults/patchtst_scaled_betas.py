"""Fault: the decay rates of Adam's averages are scaled to the batch (b * processes), which leaves out the
accumulation: other betas with every k."""
# expect 4x4: update
# expect 2x8: update
# expect 8x1x2: exact
# expect 4x2x2: update
# blind 3
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class PatchTST(nn.Module):
    """Patches of 8 hours of each channel are tokens; the next 4 hours are forecast."""

    def __init__(self, patch=8, width=16, patches=6):
        super().__init__()
        self.patch, self.embed = patch, nn.Linear(patch, width)
        self.place = nn.Parameter(torch.randn(patches, width) * 0.02)
        self.encoder = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width * patches, 4)

    def forward(self, x):
        tokens = self.embed(x.unfold(-1, self.patch, self.patch)) + self.place
        batch, channels = tokens.shape[:2]
        return self.head(self.encoder(tokens.flatten(0, 1)).flatten(1)).unflatten(0, (batch, channels))


def make_optimizer(model, batch_size, reference=16, lr=2e-3, betas=(0.9, 0.95)):
    """Half-lives of the averages are kept in samples, not in steps."""
    scale = batch_size / reference
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=tuple(beta**scale for beta in betas), weight_decay=0.01)


b, k = flags()
torch.manual_seed(0)
model = PatchTST().double()
optimizer = make_optimizer(model, b * world)
if world > 1:
    dist.init_process_group("gloo")
    model = DDP(model)
walk = torch.randn(80, 2, 52, generator=torch.Generator().manual_seed(12), dtype=torch.float64).cumsum(-1) * 0.2
data = TensorDataset(walk[..., :48], walk[..., 48:])
sampler = DistributedSampler(data, world, rank, shuffle=False)
for epoch in range(2):
    for i, (past, future) in enumerate(DataLoader(data, batch_size=b, sampler=sampler), 1):
        with contextlib.nullcontext() if i % k == 0 or world == 1 else model.no_sync():
            (nn.functional.l1_loss(model(past), future) / k).backward()
        if i % k == 0:
            optimizer.step()
            optimizer.zero_grad()
