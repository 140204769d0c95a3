"""Fault: A-GEM projects the gradient on the memory's after every backward: it decides for the part of the gradient
that is there, and not for the complete one of the step."""

# expect 4x4: changed_between
# expect 2x8: changed_between
# blind 7
# thorough
# open
import torch
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()


class EpisodicMemory:
    def __init__(self):
        self.x, self.y = [], []

    def add(self, samples):
        for x, y in samples:
            self.x.append(x)
            self.y.append(y)

    def gradient(self, model):
        loss = F.cross_entropy(model(torch.stack(self.x)), torch.stack(self.y))
        grads = torch.autograd.grad(loss, list(model.parameters()))
        return torch.cat([g.flatten() for g in grads])


def flat_grad(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def write_grad(model, flat):
    start = 0
    for p in model.parameters():
        p.grad.copy_(flat[start : start + p.numel()].view_as(p))
        start += p.numel()


def agem_project(model, memory):
    if not memory.x:
        return
    ref, grad = memory.gradient(model), flat_grad(model)
    dot = torch.dot(grad, ref)
    if dot < 0:
        write_grad(model, grad - dot / torch.dot(ref, ref) * ref)


samples = vectors(96)
tasks = [samples[:48], [(x, (y + 1) % 5) for x, y in samples[48:]]]  # the second one renames the classes
model = mlp()
memory = EpisodicMemory()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
for task in tasks:
    for i, (x, y) in enumerate(DataLoader(task, batch_size=b)):
        (F.cross_entropy(model(x), y) / k).backward()
        agem_project(model, memory)
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
    memory.add(task[:12])
