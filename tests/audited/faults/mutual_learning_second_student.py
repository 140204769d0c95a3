"""Fault: of two students that teach each other, the second one's gradients are emptied at every micro-batch, so that only
the last micro-batch of a step trains it."""

# expect 4x4: emptied_between
# expect 8x2: emptied_between
# thorough
# blind 6
import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader

T = 2.0


def student(width):
    return nn.Sequential(nn.Linear(12, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 5)).double()


def kd(mine, other):
    return F.kl_div(F.log_softmax(mine / T, -1), F.softmax(other.detach() / T, -1), reduction="batchmean") * T * T


class MutualTrainer:
    def __init__(self, accumulate):
        torch.manual_seed(0)
        self.students = [student(24), student(16)]
        self.optimizers = [torch.optim.SGD(s.parameters(), lr=0.05, momentum=0.9, nesterov=True) for s in self.students]
        self.accumulate = accumulate
        self.micro = 0

    def losses(self, x, y):
        a, b = (s(x) for s in self.students)
        return F.cross_entropy(a, y) + kd(a, b), F.cross_entropy(b, y) + kd(b, a)

    def training_step(self, x, y):
        self.micro += 1
        first, second = self.losses(x, y)
        (first / self.accumulate).backward()
        self.optimizers[1].zero_grad()
        (second / self.accumulate).backward()
        if self.micro % self.accumulate == 0:
            for optimizer in self.optimizers:
                optimizer.step()
            self.optimizers[0].zero_grad()
        return first.item(), second.item()

    def fit(self, loader, epochs):
        for epoch in range(epochs):
            log = [self.training_step(x, y) for x, y in loader]
            first, second = torch.tensor(log).mean(0).tolist()
            print(f"epoch {epoch}: {first:.4f} {second:.4f}")


b, k = flags()
MutualTrainer(k).fit(DataLoader(vectors(64), batch_size=b), epochs=1)
