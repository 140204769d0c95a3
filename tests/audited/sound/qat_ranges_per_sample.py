"""Sound: quantization-aware training in which every sample's activations are rounded with the range of this sample alone, and observers of the step's ranges move only after the step."""
# expect 4x4: exact
# expect 2x8: exact
# blind 5
# thorough

import torch
from common_models import flags
from torch import nn

b, k = flags()


class DynamicQuant(nn.Module):
    """int8 with a scale per sample, as dynamic quantization does per token. Also remembers the largest value of the step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("observed", torch.ones(()))
        self.pending = torch.zeros((), dtype=torch.float64)

    def forward(self, x):
        largest = x.detach().abs().amax(tuple(range(1, x.dim())), keepdim=True).clamp(min=1e-6)
        if self.training:
            self.pending = torch.maximum(self.pending, largest.max())
        scale = largest.clamp(max=8 * self.observed) / 127
        return x + ((x / scale).round().clamp(-127, 127) * scale - x).detach()

    def after_step(self):
        self.observed.lerp_(self.pending, 0.1)
        self.pending = torch.zeros_like(self.pending)


class QuantConv(nn.Conv1d):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.quant = DynamicQuant()

    def forward(self, x):
        scale = self.weight.detach().abs().amax((1, 2), keepdim=True) / 7  # int4 per channel
        weight = self.weight + ((self.weight / scale).round() * scale - self.weight).detach()
        return self._conv_forward(self.quant(x), weight, self.bias)


g = torch.Generator().manual_seed(76)
vibration, fault = torch.randn(80, 3, 40, generator=g, dtype=torch.float64), torch.randint(4, (80,), generator=g)
torch.manual_seed(0)
model = nn.Sequential(
    QuantConv(3, 8, 5, stride=2), nn.ReLU(), QuantConv(8, 12, 5, stride=2), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
    nn.Linear(12, 4),
).double()  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(10):
    at = step % 5 * 16
    for micro in range(k):
        rows = slice(at + micro * b, at + (micro + 1) * b)
        (nn.functional.cross_entropy(model(vibration[rows]), fault[rows]) / k).backward()
    optimizer.step()
    optimizer.zero_grad()
    for module in model.modules():
        if isinstance(module, DynamicQuant):
            module.after_step()
