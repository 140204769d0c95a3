"""Sound: LARS under fp16 autocast; scaled gradients are added up and reduced, unscaled once, and the trust ratio is taken of the complete gradient in the step."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 5
# thorough

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class LARS(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9, weight_decay=1e-4, trust_coefficient=0.02):
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust_coefficient}
        )

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad
                if p.ndim > 1:  # neither biases nor norms
                    update = update + group["weight_decay"] * p
                    norms = p.norm(), update.norm()
                    if min(norms) > 0:
                        update = update * group["trust"] * norms[0] / norms[1]
                buffer = self.state[p].setdefault("mu", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(update)
                p.sub_(group["lr"] * buffer)


class PatchNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.mix = nn.Conv2d(3, 16, 4, stride=4), nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.norm, self.head = nn.GroupNorm(4, 16), nn.Linear(16, 6)

    def forward(self, x):
        x = F.relu(self.stem(x))
        return self.head((x + F.relu(self.norm(self.mix(x)))).mean((2, 3)))


b, k = flags()
g = torch.Generator().manual_seed(74)
photos, labels = torch.randn(77, 3, 16, 16, generator=g).to(dtype), torch.randint(6, (77,), generator=g)
torch.manual_seed(0)
model = PatchNet().to(dtype)
optimizer = LARS(model.parameters(), lr=0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, enabled=not FULL)
if world > 1:
    dist.init_process_group("gloo")
for step in range(5):
    images = min(16, 77 - 16 * step)
    optimizer.zero_grad(set_to_none=False)
    for micro in range(k):
        start = 16 * step + (micro * world + rank) * b
        x, y = photos[start : start + b], labels[start : start + b]
        with torch.autocast("cpu", torch.float16, enabled=not FULL):
            logits = model(x)
        scaler.scale(F.cross_entropy(logits.to(dtype), y, reduction="sum") / images).backward()
    if world > 1:
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(flat)
        for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
            p.grad.copy_(part.view_as(p))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
