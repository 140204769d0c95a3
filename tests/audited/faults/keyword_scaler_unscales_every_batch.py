"""Fault: scaler.unscale_ and scaler.update are called at every micro-batch, for a look at the gradient norm: what the
earlier micro-batches gave is unscaled again at each later one."""

# expect 4x4: changed_between
# expect 8x2: changed_between
# blind 7
# thorough
import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
b, k = flags()
MELS, FRAMES, WORDS = 8, 20, 6

g = torch.Generator().manual_seed(1)
words = torch.randint(WORDS, (80,), generator=g)
templates = torch.randn(WORDS, MELS, FRAMES, generator=g, dtype=torch.float64)
mels = templates[words] + 0.8 * torch.randn(80, MELS, FRAMES, generator=g, dtype=torch.float64)


class KeywordNet(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.conv1 = nn.Conv1d(MELS, width, 5, padding=2)
        self.conv2 = nn.Conv1d(width, width, 5, padding=4, dilation=2)
        self.fc = nn.Linear(width, WORDS)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        return self.fc(F.relu(self.conv2(x)).mean(-1))


model = KeywordNet().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
norms = []
for i, (x, y) in enumerate(DataLoader(TensorDataset(mels, words), batch_size=b)):
    loss = F.cross_entropy(model(x), y) / k
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
    if (i + 1) % k == 0:
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()
