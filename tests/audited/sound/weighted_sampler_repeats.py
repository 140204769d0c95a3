"""Sound: a WeightedRandomSampler draws with replacement, so that a step has samples twice; but it draws by sample from its own generator: all layouts get the same ones."""
# expect 4x4: exact
# expect 2x8: exact
# blind 4
# thorough

from collections import Counter

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler


class Faults(Dataset):
    """Vibration of bearings; most are healthy."""

    def __init__(self, n=77):
        g = torch.Generator().manual_seed(90)
        self.kind = torch.multinomial(torch.tensor([0.8, 0.1, 0.06, 0.04]), n, replacement=True, generator=g)
        time = torch.arange(32, dtype=torch.float64)
        self.signal = torch.sin(time * (0.3 + 0.4 * self.kind[:, None])) + torch.randn(n, 32, generator=g).double()

    def weights(self):
        count = Counter(self.kind.tolist())
        return [1 / count[kind] for kind in self.kind.tolist()]

    def __len__(self):
        return len(self.kind)

    def __getitem__(self, i):
        return self.signal[i][None], self.kind[i]


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, width), nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.conv(F.relu(self.norm(x)))


b, k = flags()
torch.manual_seed(0)
data = Faults()
sampler = WeightedRandomSampler(data.weights(), num_samples=96, generator=torch.Generator().manual_seed(1))
model = nn.Sequential(
    nn.Conv1d(1, 8, 5, stride=2), Residual(8), Residual(8), nn.AdaptiveMaxPool1d(4), nn.Flatten(), nn.Linear(32, 4)
)
model = model.double()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
samples_seen = 0
for epoch in range(2):
    for i, (signal, kind) in enumerate(DataLoader(data, batch_size=b, sampler=sampler), 1):
        loss = F.cross_entropy(model(signal), kind) / k
        loss.backward()
        samples_seen += len(kind)
        if i % k == 0:
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * min(1.0, samples_seen / 64)
            optimizer.step()
            optimizer.zero_grad()
