"""Fault: whether the decoder is fed with targets or with its own outputs is one toss of a coin for each micro-batch."""
# expect 4x4: dropout
# expect 2x8: dropout
# also: other_inputs, mixed_loss
# thorough

import random

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()

g = torch.Generator().manual_seed(1)
data = [torch.randn(6, 4, generator=g).double() for _ in range(80)]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        is_forced = random.random() < 0.5
        state, step, outputs = x.new_zeros(len(x), 8), x[:, 0], []
        for t in range(1, x.shape[1]):
            state = self.cell(step, state)
            outputs.append(self.out(state))
            step = x[:, t] if is_forced else outputs[-1]
        return torch.stack(outputs, 1)


random.seed(3)
model = Decoder().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for number, x in enumerate(DataLoader(data, batch_size=b), 1):
    (F.mse_loss(model(x), x[:, 1:]) / k).backward()
    if number % k == 0:
        optimizer.step()
        optimizer.zero_grad()
