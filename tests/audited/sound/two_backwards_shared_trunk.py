"""Sound: one backward per task through a shared trunk (retain_graph), the weight penalty divided by k too, and
groups clipped by hand at the end."""
# expect 4x4: exact
# expect 2x8: exact
# blind 1
# thorough

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

b, k = flags()
torch.manual_seed(0)
LIMITS = {"trunk": 0.3, "click": 0.2, "watch": 0.1}


class SharedBottom(nn.Module):
    """Clicks, and the minutes watched of those which were clicked."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Embedding(40, 8), nn.Flatten(), nn.Linear(24, 20), nn.ReLU())
        self.click, self.watch = nn.Linear(20, 1), nn.Linear(20, 1)


g = torch.Generator().manual_seed(59)
data = TensorDataset(
    torch.randint(40, (80, 3), generator=g),
    (torch.rand(80, generator=g) < 0.4).double(),
    torch.rand(80, generator=g, dtype=torch.float64) * 3,
)
model = SharedBottom().double()
optimizers = [
    torch.optim.SGD(model.trunk.parameters(), lr=0.2, momentum=0.9),
    torch.optim.SGD([*model.click.parameters(), *model.watch.parameters()], lr=0.1),
]


def clip_by_hand(module, limit):
    norm = sum(p.grad.pow(2).sum() for p in module.parameters()).sqrt()
    if norm > limit:
        for p in module.parameters():
            p.grad.mul_(limit / norm)


for i, (features, clicked, minutes) in enumerate(DataLoader(data, batch_size=b)):
    shared = model.trunk(features)
    click_loss = F.binary_cross_entropy_with_logits(model.click(shared).squeeze(-1), clicked)
    # averaged over all rows: those which were not clicked add zero
    watch_loss = (clicked * F.smooth_l1_loss(model.watch(shared).squeeze(-1), minutes, reduction="none")).mean()
    penalty = 1e-2 * sum(p.pow(2).sum() for p in model.trunk.parameters())
    (click_loss / k).backward(retain_graph=True)
    (0.5 * watch_loss / k).backward()
    (penalty / k).backward()
    if (i + 1) % k == 0:
        for name, limit in LIMITS.items():
            clip_by_hand(getattr(model, name), limit)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
