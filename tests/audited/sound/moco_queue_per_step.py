"""Sound: MoCo's queue takes the keys of all micro-batches and processes when the step is made, and the key
encoder moves only then, so all micro-batches of a step see the same negatives and the same keys."""
# expect 4x4: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 1
# thorough

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

world = int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
b, k = flags()


class Queue:
    def __init__(self, size=32, dim=6):
        self.keys = F.normalize(torch.randn(size, dim, dtype=torch.float64), dim=1)
        self.waiting = []

    def hold(self, keys):
        self.waiting.append(keys)

    def push(self):
        mine = torch.cat(self.waiting)
        if world > 1:
            everyone = [torch.empty_like(mine) for _ in range(world)]
            dist.all_gather(everyone, mine)
            mine = torch.cat(everyone)
        self.keys = torch.cat([self.keys, mine])[-len(self.keys) :]
        self.waiting.clear()


query_net = nn.Sequential(nn.Linear(9, 24), nn.ReLU(), nn.Linear(24, 6)).double()
key_net = copy.deepcopy(query_net).requires_grad_(False)
model = DistributedDataParallel(query_net) if world > 1 else query_net
optimizer = torch.optim.SGD(query_net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
queue = Queue()

g = torch.Generator().manual_seed(41)
scenes = torch.randn(80, 9, generator=g, dtype=torch.float64)
data = TensorDataset(scenes + 0.2 * torch.randn(80, 9, generator=g), scenes + 0.2 * torch.randn(80, 9, generator=g))
sampler = DistributedSampler(data, shuffle=False) if world > 1 else None
for epoch in range(2):
    for i, (left, right) in enumerate(DataLoader(data, batch_size=b, sampler=sampler), 1):
        if world > 1:
            model.require_backward_grad_sync = i % k == 0
        q = F.normalize(model(left), dim=1)
        key = F.normalize(key_net(right), dim=1)
        logits = torch.cat([(q * key).sum(1, keepdim=True), q @ queue.keys.T], 1) / 0.2
        (F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long)) / k).backward()
        queue.hold(key)
        if i % k == 0:
            optimizer.step()
            optimizer.zero_grad()
            queue.push()
            with torch.no_grad():
                for old, new in zip(key_net.parameters(), query_net.parameters()):
                    old.mul_(0.95).add_(new, alpha=0.05)
