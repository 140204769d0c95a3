"""Sound: a hand-written schedule-free SGD, whose weights are switched to the average for an evaluation after every second update
and back; warm-up and averaging count updates."""

# expect 4x4: exact
# expect 2x8: exact
# blind 7
# thorough
import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader


class ScheduleFreeSGD(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, beta=0.9, warmup_steps=3, weight_decay=0.0):
        defaults = {
            "lr": lr,
            "beta": beta,
            "warmup_steps": warmup_steps,
            "weight_decay": weight_decay,
            "t": 0,
            "weight_sum": 0.0,
        }
        super().__init__(params, defaults)
        self.training = True

    @torch.no_grad()
    def _move(self, weight):
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight(group["beta"]))

    def eval(self):
        if self.training:
            self._move(lambda beta: 1 - 1 / beta)
        self.training = False

    def train(self):
        if not self.training:
            self._move(lambda beta: 1 - beta)
        self.training = True

    @torch.no_grad()
    def step(self, closure=None):
        assert self.training
        for group in self.param_groups:
            group["t"] += 1
            lr, beta = group["lr"] * min(1.0, group["t"] / group["warmup_steps"]), group["beta"]
            group["weight_sum"] += lr**2
            c = lr**2 / group["weight_sum"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                grad = p.grad.add(p, alpha=group["weight_decay"])
                p.lerp_(z, c)
                p.add_(grad, alpha=lr * (beta * (1 - c) - 1))
                z.sub_(grad, alpha=lr)


@torch.no_grad()
def evaluate(model, optimizer, held_out):
    model.eval()
    optimizer.eval()
    x, y = next(iter(DataLoader(held_out, batch_size=len(held_out))))
    accuracy = (model(x).argmax(-1) == y).double().mean().item()
    model.train()
    optimizer.train()
    return accuracy


torch.manual_seed(0)
b, k = flags()
data = vectors(128)
train_set, held_out = data[:96], data[96:]
model = nn.Sequential(nn.Linear(12, 32), nn.Mish(), nn.Linear(32, 5)).double()
optimizer = ScheduleFreeSGD(model.parameters(), lr=0.2, weight_decay=1e-3)
updates = 0
for i, (x, y) in enumerate(DataLoader(train_set, batch_size=b), 1):
    F.cross_entropy(model(x), y).div(k).backward()
    if i % k == 0:
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
        if updates % 2 == 0:
            print(updates, evaluate(model, optimizer, held_out))
