"""Fault: the memory of negatives (cross-batch memory) takes the keys of every micro-batch in the forward: the later
micro-batches of a step are compared with the earlier ones."""

# expect 4x4: state
# expect 2x8: state
# thorough
# blind 6
import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader


class Retriever(nn.Module):
    def __init__(self, dim=12, out=8, size=32, temperature=0.1):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(dim, 24), nn.Tanh(), nn.Linear(24, out))
        self.passage = nn.Sequential(nn.Linear(dim, 24), nn.Tanh(), nn.Linear(24, out))
        self.register_buffer("memory", F.normalize(torch.randn(size, out), dim=-1))
        self.register_buffer("ptr", torch.zeros((), dtype=torch.long))
        self.temperature = temperature

    @torch.no_grad()
    def enqueue(self, keys):
        place = (self.ptr + torch.arange(len(keys))) % len(self.memory)
        self.memory[place] = keys
        self.ptr.add_(len(keys))

    def forward(self, q, p):
        q = F.normalize(self.query(q), dim=-1)
        p = F.normalize(self.passage(p), dim=-1)
        positive = (q * p).sum(-1, keepdim=True)
        negative = q @ self.memory.clone().t()
        logits = torch.cat([positive, negative], 1) / self.temperature
        if self.training:
            self.enqueue(p.detach())
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


def pairs(n):
    """A passage and a question that is a blurred copy of it."""
    g = torch.Generator().manual_seed(7)
    return [(x + 0.3 * torch.randn(12, generator=g, dtype=torch.float64), x) for x, _ in vectors(n)]


b, k = flags()
torch.manual_seed(0)
model = Retriever().double().train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for i, (q, p) in enumerate(DataLoader(pairs(96), batch_size=b)):
    loss = model(q, p) / k
    loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
