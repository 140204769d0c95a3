"""Fault: a temporal graph network writes its memory in every forward, so that later micro-batches of a step read what earlier ones wrote."""
# expect 4x4: state
# expect 2x8: state
# blind 4
# thorough

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn

NODES, WIDTH = 20, 12


def events(n=80):
    """User edits a page at a time; half of the pairs are not true ones."""
    g = torch.Generator().manual_seed(5)
    user, page = torch.randint(0, 10, (n,), generator=g), torch.randint(10, 20, (n,), generator=g)
    time = torch.rand(n, generator=g, dtype=torch.float64).cumsum(0)
    text = torch.randn(n, 4, generator=g, dtype=torch.float64)
    other = torch.randint(10, 20, (n,), generator=g)
    return user, page, other, time, text


class TGN(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("memory", torch.zeros(NODES, WIDTH))
        self.register_buffer("last_seen", torch.zeros(NODES))
        self.static = nn.Embedding(NODES, WIDTH)
        self.message = nn.Linear(2 * WIDTH + 5, WIDTH)
        self.link = nn.Sequential(nn.Linear(2 * WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))

    def embed(self, node):
        return self.memory[node] + self.static(node)

    def forward(self, user, page, other, time, text):
        u, p, o = self.embed(user), self.embed(page), self.embed(other)
        since = (time - self.last_seen[user])[:, None].log1p()
        message = torch.tanh(self.message(torch.cat([u, p, since, text], 1)))
        true = self.link(torch.cat([u + message, p], 1)).squeeze(1)
        false = self.link(torch.cat([u + message, o], 1)).squeeze(1)
        self.remember(user, page, time, message)
        return true, false

    @torch.no_grad()
    def remember(self, user, page, time, message):
        for nodes in (user, page):
            for node, t, m in zip(nodes.tolist(), time, message):
                self.memory[node] = 0.7 * self.memory[node] + 0.3 * m
                self.last_seen[node] = t


torch.manual_seed(0)
b, k = flags()
model = TGN().double()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
stream = events()
for epoch in range(2):
    model.memory.zero_()
    model.last_seen.zero_()
    for i, start in enumerate(range(0, 80, b), 1):
        true, false = model(*(column[start : start + b] for column in stream))
        loss = F.softplus(-true).mean() + F.softplus(false).mean()
        (loss / k).backward()
        if i % k == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
