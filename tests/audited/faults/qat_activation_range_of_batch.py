"""Fault: in quantization-aware training the activations are rounded to 4 bits with one scale for the whole micro-batch, that of its largest value."""
# expect 4x4: mixed_samples
# expect 2x8: mixed_samples
# expect 8x2: mixed_samples
# blind 5
# thorough

import torch
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class FakeQuantize(nn.Module):
    """Rounds in the forward, lets the gradient through (straight-through estimator)."""

    def __init__(self, bits, axis=None):
        super().__init__()
        self.levels, self.axis = 2 ** (bits - 1) - 1, axis

    def forward(self, x):
        largest = x.detach().abs().max() if self.axis is None else x.detach().abs().amax(self.axis, keepdim=True)
        scale = largest.clamp(min=1e-8) / self.levels
        rounded = (x / scale).round().clamp(-self.levels, self.levels) * scale
        return x + (rounded - x).detach()


class QuantLinear(nn.Linear):
    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out)
        self.weight_fake_quant = FakeQuantize(8, axis=1)  # per output channel
        self.input_fake_quant = FakeQuantize(4)

    def forward(self, x):
        return nn.functional.linear(self.input_fake_quant(x), self.weight_fake_quant(self.weight), self.bias)


class KeywordNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.mid, self.head = QuantLinear(20, 32), QuantLinear(32, 32), QuantLinear(32, 6)

    def forward(self, x):
        return self.head(torch.relu(self.mid(torch.relu(self.stem(x)))))


def train_one_epoch(model, criterion, optimizer, loader, accumulate):
    model.train()
    for i, (features, target) in enumerate(loader):
        (criterion(model(features), target) / accumulate).backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    b, k = flags()
    g = torch.Generator().manual_seed(53)
    mfcc = torch.randn(80, 20, generator=g) * (0.5 + torch.rand(80, 1, generator=g))
    loader = DataLoader(TensorDataset(mfcc.double(), torch.randint(6, (80,), generator=g)), batch_size=b)
    torch.manual_seed(0)
    model = KeywordNet().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train_one_epoch(model, nn.CrossEntropyLoss(), optimizer, loader, k)
