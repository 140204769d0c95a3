"""Sound: NFNets' adaptive clipping of each row when a window is complete, and Lookahead's slow weights by a hook of the optimizer's step."""
# expect 4x4: exact
# expect 2x8: exact
# blind 4
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, images
from torch import nn
from torch.utils.data import DataLoader


class ScaledConv(nn.Conv2d):
    """Its kernels are standardized, which depends on no sample."""

    def forward(self, x):
        var, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True)
        return self._conv_forward(x, (self.weight - mean) / (var * self.weight[0].numel() + 1e-4).sqrt(), self.bias)


def rows_norm(t):
    return t.flatten(1).norm(dim=1).view(-1, *[1] * (t.dim() - 1)) if t.dim() > 1 else t.abs()


@torch.no_grad()
def adaptive_clip(parameters, share=0.05, eps=1e-3):
    for p in parameters:
        largest = rows_norm(p).clamp(min=eps) * share
        norm = rows_norm(p.grad)
        p.grad.copy_(torch.where(norm > largest, p.grad * largest / norm.clamp(min=1e-9), p.grad))


class Lookahead:
    def __init__(self, optimizer, every=3, alpha=0.5):
        self.every, self.alpha, self.steps = every, alpha, 0
        self.slow = {p: p.detach().clone() for group in optimizer.param_groups for p in group["params"]}
        optimizer.register_step_post_hook(self.after_step)

    @torch.no_grad()
    def after_step(self, optimizer, args, kwargs):
        self.steps += 1
        if self.steps % self.every == 0:
            for p, slow in self.slow.items():
                slow.lerp_(p, self.alpha)
                p.copy_(slow)


torch.manual_seed(0)
b, k = flags()
model = nn.Sequential(
    ScaledConv(2, 10, 3, padding=1),
    nn.SiLU(),
    ScaledConv(10, 10, 3, stride=2),
    nn.SiLU(),
    nn.Flatten(),
    nn.Linear(40, 5),
).double()
*body, head_weight, head_bias = model.parameters()
optimizer = torch.optim.RAdam([{"params": body, "lr": 5e-3}, {"params": [head_weight, head_bias], "lr": 1e-2}])
Lookahead(optimizer)
for epoch in range(2):
    for i, (x, y) in enumerate(DataLoader(images(80), batch_size=b)):
        loss = F.cross_entropy(model(x), y, label_smoothing=0.05) / k
        loss.backward()
        if (i + 1) % k == 0:
            adaptive_clip(body)
            optimizer.step()
            optimizer.zero_grad()
