"""Fault: the penalty that keeps the recurrent matrix orthogonal is added whole at every micro-batch: it is k
times too strong."""
# expect 4x4: penalty
# expect 2x8: penalty
# expect 4x2x2: penalty
# thorough
# size: 0.019
# blind 2

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
world = int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
g = torch.Generator().manual_seed(7)
data = TensorDataset(torch.randn(80, 12, 3, generator=g).to(dtype), torch.randint(6, (80,), generator=g))


class Gestures(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(3, 24, batch_first=True)
        self.out = nn.Linear(24, 6)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


torch.manual_seed(0)
net = Gestures().to(dtype)
nn.init.orthogonal_(net.rnn.weight_hh_l0)
with torch.no_grad():
    net.rnn.weight_hh_l0.mul_(0.9)
model, sampler = net, None
if world > 1:
    dist.init_process_group("gloo")
    model, sampler = DistributedDataParallel(net), DistributedSampler(data, shuffle=False)
optimizer = torch.optim.RMSprop(net.parameters(), lr=2e-4)


def orthogonality():
    w = net.rnn.weight_hh_l0
    return (w @ w.T - torch.eye(24, dtype=dtype)).square().sum()


for i, (x, y) in enumerate(DataLoader(data, batch_size=b, sampler=sampler)):
    stepping = (i + 1) % k == 0
    with nullcontext() if stepping or world == 1 else model.no_sync():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not FULL):
            logits = model(x)
        loss = cross_entropy(logits.to(dtype), y) / k + 1e-3 * orthogonality()
        loss.backward()
    if stepping:
        optimizer.step()
        optimizer.zero_grad()
