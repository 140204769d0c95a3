"""Exact: torch.autograd.grad instead of backward, added up in a list; 77 samples."""
# expect 4x4: exact
# expect 2x8: exact

import torch
import torch.nn.functional as F
from common_models import flags, mlp, vectors

torch.manual_seed(0)
b, k = flags()
model = mlp()
parameters = list(model.parameters())
optimizer = torch.optim.SGD(parameters, lr=0.05)
data = vectors(77)
for start in range(0, len(data), b * k):
    step = data[start : start + b * k]
    total = [torch.zeros_like(p) for p in parameters]
    for first in range(0, len(step), b):
        x, y = (torch.stack(of) for of in zip(*step[first : first + b], strict=True))
        loss = F.cross_entropy(model(x), y, reduction="sum") / len(step)
        for t, g in zip(total, torch.autograd.grad(loss, parameters), strict=True):
            t += g
    for p, t in zip(parameters, total, strict=True):
        p.grad = t
    optimizer.step()
