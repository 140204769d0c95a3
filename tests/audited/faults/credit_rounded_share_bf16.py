"""Fault: the share of a micro-batch is 1 / k rounded to two decimals: 0.12 for k = 8, so that the gradient is 4
% too small."""
# expect 4x4: exact
# expect 2x8: factor
# expect 1x16: factor
# size: 0.04
# blind 2

import os

import torch
from common_models import flags
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

FULL = os.environ.get("FULL") == "1"
low, high = (torch.float64, torch.float64) if FULL else (torch.bfloat16, torch.float32)
b, k = flags()
config = {"lr": 0.05, "loss_share": round(1 / k, 2), "clip": None}

g = torch.Generator().manual_seed(10)
age, income = torch.rand(80, 1, generator=g), torch.randn(80, 9, generator=g)
data = TensorDataset(torch.cat([age, income], 1), (torch.rand(80, generator=g) < 0.2).float())


class Masters:
    """float32 copies of the weights of a bfloat16 model: they are trained, and take the gradient of every micro-batch."""

    def __init__(self, model):
        self.pairs = [(p, p.detach().to(high, copy=True)) for p in model.parameters()]

    def weights(self):
        return [master for _, master in self.pairs]

    def add_gradients(self):
        for p, master in self.pairs:
            grad = p.grad.to(high)
            master.grad = grad if master.grad is None else master.grad + grad
            p.grad = None

    @torch.no_grad()
    def publish(self):
        for p, master in self.pairs:
            p.copy_(master)
            master.grad = None


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 1)).to(low)
masters = Masters(model)
optimizer = torch.optim.SGD(masters.weights(), lr=config["lr"], momentum=0.9)
for number, (x, defaulted) in enumerate(DataLoader(data, batch_size=b), 1):
    logits = model(x.to(low)).squeeze(-1).to(high)
    loss = binary_cross_entropy_with_logits(logits, defaulted.to(high))
    (loss * config["loss_share"]).backward()
    masters.add_gradients()
    if number % k == 0:
        optimizer.step()
        masters.publish()
