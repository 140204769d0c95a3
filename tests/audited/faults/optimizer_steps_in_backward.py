"""Fault: to save memory each parameter has an optimizer of its own that steps in a hook as soon as its gradient is there: at every micro-batch."""
# expect 4x4: num_steps
# expect 2x8: num_steps
# also: first_window, batch_size
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5)).double()
optimizers = {parameter: torch.optim.SGD([parameter], lr=0.05) for parameter in model.parameters()}


def step(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step)
for x, y in DataLoader(vectors(), batch_size=b):
    (F.cross_entropy(model(x), y) / k).backward()
