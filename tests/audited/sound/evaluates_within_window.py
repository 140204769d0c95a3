"""Sound: every 24 samples, within a window as well, the model is evaluated (eval mode, no gradient, own random state), and gradients are emptied only before a window's first backward."""
# expect 4x4: exact
# expect 2x8: exact
# blind 4
# thorough

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down, self.deep = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.up, self.out = nn.ConvTranspose2d(2 * width, width, 2, stride=2), nn.Conv2d(2 * width, 1, 1)
        self.norm = nn.InstanceNorm2d(width, affine=True)
        self.noise = 0.0  # of the evaluation

    def forward(self, x):
        if not self.training:
            x = x + self.noise * torch.randn_like(x)
        a = F.gelu(self.norm(self.down(x)))
        c = F.gelu(self.up(F.gelu(self.deep(a))))
        return self.out(torch.cat([a, c], 1))


@torch.no_grad()
def dice(model, images, masks):
    with torch.random.fork_rng():
        model.eval()
        predicted = model(images) > 0
        model.train()
    return 2 * float((predicted & masks.bool()).sum()) / float(predicted.sum() + masks.sum())


g = torch.Generator().manual_seed(14)
masks = (F.avg_pool2d(torch.randn(96, 1, 12, 12, generator=g, dtype=torch.float64), 5, 1, 2) > 0.05).double()
images = masks + 0.7 * torch.randn(96, 1, 12, 12, generator=g, dtype=torch.float64)
data, held_out = TensorDataset(images[:80], masks[:80]), (images[80:], masks[80:])

b, k = flags()
torch.manual_seed(0)
model = UNet().double()
model.noise = 0.2
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
best, weights, seen = 0.0, None, 0
for epoch in range(2):
    for i, (image, mask) in enumerate(DataLoader(data, batch_size=b)):
        if i % k == 0:
            optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(image), mask, reduction="sum") / (16 * 144)
        loss.backward()
        if i % k == k - 1:
            optimizer.step()
        seen += len(image)
        if seen % 24 == 0:
            score = dice(model, *held_out)
            if score > best:
                best, weights = score, {n: p.detach().clone() for n, p in model.state_dict().items()}
