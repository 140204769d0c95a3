"""Fault: learned task weights (Kendall): the losses are divided by k, but the log-variance term s is added
whole at every micro-batch."""
# expect 4x4: penalty
# expect 2x8: penalty
# blind 1
# thorough

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

b, k = flags()
torch.manual_seed(0)


class MultiTask(nn.Module):
    """Depth, class and angle of a patch from one trunk."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 24), nn.SiLU())
        self.depth, self.label, self.angle = nn.Linear(24, 1), nn.Linear(24, 4), nn.Linear(24, 2)
        self.log_var = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        hidden = self.trunk(x)
        return self.depth(hidden).squeeze(-1), self.label(hidden), F.normalize(self.angle(hidden), dim=-1)


def task_losses(outputs, depth, label, angle):
    direction = torch.stack([angle.cos(), angle.sin()], dim=-1)
    return torch.stack(
        [
            F.mse_loss(outputs[0], depth),
            F.cross_entropy(outputs[1], label),
            (1 - (outputs[2] * direction).sum(-1)).mean(),
        ]
    )


g = torch.Generator().manual_seed(21)
x = torch.randn(80, 10, generator=g, dtype=torch.float64)
data = TensorDataset(
    x, x[:, :3].sum(-1), torch.randint(4, (80,), generator=g), 3 * torch.rand(80, generator=g, dtype=torch.float64)
)
model = MultiTask().double()
optimizer = torch.optim.SGD(
    [
        {"params": [p for n, p in model.named_parameters() if n != "log_var"]},
        {"params": [model.log_var], "lr": 0.02},
    ],
    lr=0.05,
)
for i, (patch, *truth) in enumerate(DataLoader(data, batch_size=b)):
    losses = task_losses(model(patch), *truth) / k
    loss = (torch.exp(-model.log_var) * losses + model.log_var).sum()
    loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
