"""Fault: the attack empties the model's gradients after it has looked at the input's, and with them those of
the micro-batches before."""
# expect 4x4: emptied_between
# expect 2x8: emptied_between
# expect 8x1x2: exact
# expect 4x2x2: emptied_between
# blind 3
# thorough

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, images
from torch import nn

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")


class FGSM:
    def __init__(self, model, epsilon=0.1):
        self.model, self.epsilon = model, epsilon

    def __call__(self, x, y):
        x = x.clone().requires_grad_(True)
        F.cross_entropy(self.model(x), y, reduction="sum").backward()
        adversarial = (x + self.epsilon * x.grad.sign()).detach()
        self.model.zero_grad()  # the attack must not train the model
        return adversarial


def average_gradients(model):
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            p.grad.div_(world)


def train_epoch(model, optimizer, batches, accumulation_steps):
    attack = FGSM(model)
    optimizer.zero_grad()
    for i, (x, y) in enumerate(batches):
        adversarial = attack(x, y)
        loss = F.cross_entropy(model(adversarial), y) / accumulation_steps
        loss.backward()
        if (i + 1) % accumulation_steps == 0:
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()


b, k = flags()
torch.manual_seed(1)
model = nn.Sequential(
    nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5)
).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
pictures, labels = map(torch.stack, zip(*images(80)))
starts = range(rank * b, 80, b * world)
train_epoch(model, optimizer, [(pictures[s : s + b], labels[s : s + b]) for s in starts], k)
