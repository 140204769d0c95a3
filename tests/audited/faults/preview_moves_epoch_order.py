"""Fault: a picture for the log is picked with the global generator in every micro-batch, and the next epoch's
order is drawn from the same generator: from the second epoch on, steps have other samples for other k."""
# expect 4x4: other_samples
# expect 8x1x2: exact
# expect 4x2x2: other_samples
# thorough
# also: other_inputs
# blind 1

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, images
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
b, k = flags()
torch.manual_seed(0)

classifier = nn.Sequential(
    nn.Conv2d(2, 6, 3), nn.GELU(), nn.Conv2d(6, 6, 3), nn.GELU(), nn.Flatten(), nn.Linear(24, 5)
).double()
model = DistributedDataParallel(classifier) if world > 1 else classifier
optimizer = torch.optim.SGD(classifier.parameters(), lr=0.1, momentum=0.9, nesterov=True)
dataset = images(80)
previews = []


def remember_preview(x, logits, y):
    """One random image with its prediction, for the board."""
    pick = int(torch.randint(len(x), (1,)))
    previews.append((x[pick].clone(), int(logits[pick].argmax()), int(y[pick])))


for epoch in range(3):
    order = torch.randperm(len(dataset))[rank::world].tolist()
    loader = DataLoader(Subset(dataset, order), batch_size=b)
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % k == 0
        if world > 1:
            model.require_backward_grad_sync = last
        logits = model(x)
        (F.cross_entropy(logits, y) / k).backward()
        remember_preview(x, logits, y)
        if last:
            optimizer.step()
            optimizer.zero_grad()
