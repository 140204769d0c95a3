"""Fault: gradients are taken by torch.autograd.grad, for an optimizer of one flat vector. The sum of a window is begun anew
with each micro-batch, where it should be added to."""
# expect 4x4: dropped_micro_batches
# expect 8x2: dropped_micro_batches

import torch
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
model = mlp()
parameters = list(model.parameters())
optimizer = torch.optim.Adam(parameters, lr=0.01)
averaged = None
for number, (x, y) in enumerate(DataLoader(vectors(80), batch_size=b), 1):
    averaged = torch.autograd.grad(F.cross_entropy(model(x), y) / k, parameters)
    if number % k == 0:
        for p, gradient in zip(parameters, averaged, strict=True):
            p.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        averaged = None
