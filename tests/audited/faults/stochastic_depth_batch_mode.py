"""Fault: stochastic depth in mode "batch" drops a residual branch for all images of a micro-batch at once, so
every cut of the global batch drops others."""
# expect 4x4: dropout
# expect 2x8: dropout
# blind 1
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, images
from torch import nn
from torch.utils.data import DataLoader


class StochasticDepth(nn.Module):
    """As torchvision.ops.StochasticDepth."""

    def __init__(self, p, mode):
        super().__init__()
        self.p, self.mode = p, mode

    def forward(self, x):
        if not self.training or self.p == 0.0:
            return x
        size = [x.shape[0]] + [1] * (x.ndim - 1) if self.mode == "row" else [1] * x.ndim
        noise = torch.empty(size, dtype=x.dtype).bernoulli_(1 - self.p)
        return x * noise.div_(1 - self.p)


class Block(nn.Module):
    def __init__(self, width, p):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.GroupNorm(1, width)
        self.mix = nn.Conv2d(width, width, 1)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 0.5))
        self.drop = StochasticDepth(p, "batch")

    def forward(self, x):
        return x + self.drop(self.scale * F.gelu(self.mix(self.norm(self.depthwise(x)))))


torch.manual_seed(0)
b, k = flags()
rates = torch.linspace(0, 0.5, 4).tolist()
model = nn.Sequential(
    nn.Conv2d(2, 8, 2, stride=2), *[Block(8, p) for p in rates], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
loader = DataLoader(images(80), batch_size=b)
model.train()
for epoch in range(2):
    for step, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        (loss / k).backward()
        if (step + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
