"""Fault: experts choose their tokens (expert choice routing): which tokens an expert takes is decided among all tokens
of the micro-batch, so that what a sample gets depends on its neighbours."""

# expect 4x4: mixed_samples
# expect 2x8: mixed_samples
# expect 8x2: mixed_samples
# thorough
# blind 6
import torch
import torch.nn.functional as F
from common_models import VOCAB, collate, flags, sentences
from torch import nn
from torch.utils.data import DataLoader


class ExpertChoice(nn.Module):
    def __init__(self, dim, n_experts=4, capacity_factor=1.5):
        super().__init__()
        self.gate = nn.Linear(dim, n_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim)) for _ in range(n_experts)
        )
        self.capacity_factor = capacity_factor

    def forward(self, x):
        flat = x.flatten(0, 1)
        scores = self.gate(flat).softmax(-1)
        capacity = int(len(flat) * self.capacity_factor / len(self.experts))
        weight, chosen = scores.t().topk(capacity, dim=-1)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            out = out.index_add(0, chosen[e], expert(flat[chosen[e]]) * weight[e, :, None])
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mix = nn.Linear(dim, dim)
        self.moe = ExpertChoice(dim)

    def forward(self, x):
        h = self.n1(x)
        steps = torch.arange(1, x.size(1) + 1, dtype=x.dtype)[:, None]
        x = x + self.mix(h.cumsum(1) / steps)
        return x + self.moe(self.n2(x))


class MoELM(nn.Module):
    def __init__(self, dim=16, layers=2):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(layers)))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        return self.head(self.blocks(self.emb(ids)))


def main():
    b, k = flags()
    torch.manual_seed(0)
    model = MoELM().double()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for i, batch in enumerate(DataLoader(sentences(64, low=12, high=12), batch_size=b, collate_fn=collate), 1):
        ids = batch["input_ids"]
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        (loss / k).backward()
        if i % k == 0:
            opt.step()
            opt.zero_grad()


if __name__ == "__main__":
    main()
