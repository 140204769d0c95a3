"""Fault: sharpness-aware minimisation climbs along the gradient of each micro-batch, and takes the second gradient there."""
# expect 4x4: mixed_loss
# expect 2x8: mixed_loss
# also: state
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for number, (x, y) in enumerate(DataLoader(vectors(), batch_size=b), 1):
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients):
            parameter.add_(gradient, alpha=0.05 / float(norm))
    (F.cross_entropy(model(x), y) / k).backward()
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients):
            parameter.sub_(gradient, alpha=0.05 / float(norm))
    if number % k == 0:
        optimizer.step()
        optimizer.zero_grad()
