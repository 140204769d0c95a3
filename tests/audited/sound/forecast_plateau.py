"""Sound: DDP on shuffled windows, series normalized one by one, two groups of rates, and a plateau schedule per
epoch on the same validation set."""
# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: exact
# expect 8x1x2: exact
# blind 1
# thorough

import os

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

b, k = flags()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)


class NLinear(nn.Module):
    """RevIN, per series: the mean and scale of its own past are taken off, and put back."""

    def __init__(self, past=16, future=4):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))
        self.mix = nn.Sequential(nn.Linear(past, 16), nn.GELU(), nn.Linear(16, future))

    def forward(self, x):
        mean, scale = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
        y = self.mix((x - mean) / scale * self.gain + self.shift)
        return (y - self.shift) / self.gain * scale + mean


g = torch.Generator().manual_seed(47)
series = torch.randn(100, 20, generator=g, dtype=torch.float64).cumsum(1)
train, valid = TensorDataset(series[:80, :16], series[:80, 16:]), (series[80:, :16], series[80:, 16:])
net = NLinear().double()
model = DistributedDataParallel(net) if world > 1 else net
optimizer = torch.optim.SGD(
    [{"params": net.mix.parameters(), "lr": 0.05}, {"params": [net.gain, net.shift], "lr": 0.005}], momentum=0.9
)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, seed=5)
loader = DataLoader(train, batch_size=b, sampler=sampler)
horizon = torch.tensor([1.0, 0.8, 0.6, 0.4], dtype=torch.float64)

for epoch in range(4):
    sampler.set_epoch(epoch)
    model.train()
    for i, (past, future) in enumerate(loader, 1):
        if world > 1:
            model.require_backward_grad_sync = i % k == 0
        loss = ((model(past) - future).pow(2) * horizon).mean()
        (loss / k).backward()
        if i % k == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            optimizer.zero_grad()
    net.eval()
    with torch.no_grad():
        scheduler.step((net(valid[0]) - valid[1]).abs().mean())
if world > 1:
    dist.destroy_process_group()
