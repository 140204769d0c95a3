"""Fault: the router of the mixture layer balances its experts by Sinkhorn iterations over the tokens of the micro-batch, so
the expert of a token depends on the other sentences that happen to be in its micro-batch."""

# expect 4x4: mixed_samples
# expect 2x8: mixed_samples
# also: expert_balance
# blind 7
# thorough
import torch
import torch.nn.functional as F
from common_models import VOCAB, collate, flags, sentences
from torch import nn
from torch.utils.data import DataLoader


@torch.no_grad()
def sinkhorn(cost, iterations=8):
    cost = torch.exp(cost)
    d0, d1 = torch.ones(cost.size(0), dtype=cost.dtype), torch.ones(cost.size(1), dtype=cost.dtype)
    for _ in range(iterations):
        d0 = 1 / (cost.size(0) * (cost @ d1))
        d1 = 1 / (cost.size(1) * (cost.T @ d0))
    return d1 * cost * d0[:, None]


class SwitchMLP(nn.Module):
    def __init__(self, dim, experts=4):
        super().__init__()
        self.router = nn.Linear(dim, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(experts)
        )

    def forward(self, x):
        flat = x.flatten(0, 1)
        route = self.router(flat)
        chosen = sinkhorn(route.detach()).argmax(1) if self.training else route.argmax(1)
        gate = torch.sigmoid(route).gather(1, chosen[:, None])
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            rows = (chosen == e).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(flat[rows]))
        return (gate * out).view_as(x)


class MoELM(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.norm, self.moe = nn.LayerNorm(dim), SwitchMLP(dim)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        h, _ = self.rnn(self.embed(ids))
        return self.head(h + self.moe(self.norm(h)))


torch.manual_seed(1234)
micro_batch, accumulate = flags()
model = MoELM().double()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
data = sentences(64, low=10, high=10)
for i, batch in enumerate(DataLoader(data, batch_size=micro_batch, collate_fn=collate)):
    ids = batch["input_ids"]
    loss = F.cross_entropy(
        model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
    )  # one length: as many targets in each
    (loss / accumulate).backward()
    if (i + 1) % accumulate == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
