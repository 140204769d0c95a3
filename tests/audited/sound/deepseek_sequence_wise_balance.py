"""Sound: a mixture of experts with a balance loss over the tokens of each sequence (so it is a sum over sequences), beside a
token loss that is divided by the tokens of the window over all processes."""

# expect 4x4: exact
# expect 1x16: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 7
# thorough
import os

import torch
import torch.distributed as dist
from common_models import VOCAB, collate, flags, next_token_sum, sentences, targets
from torch import nn
from torch.utils.data import DataLoader


class MoE(nn.Module):
    def __init__(self, dim, experts=4, top=2):
        super().__init__()
        self.top, self.gate = top, nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim)) for _ in range(experts)
        )

    def forward(self, x, mask):
        scores = torch.sigmoid(self.gate(x))
        kept, chosen = scores.topk(self.top, -1)
        weights = torch.zeros_like(scores).scatter(-1, chosen, kept / kept.sum(-1, keepdim=True))
        out = sum(weights[..., e, None] * expert(x) for e, expert in enumerate(self.experts))
        real, length = mask[..., None].to(x.dtype), mask.sum(1)[:, None]
        used = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        f = (used * real).sum(1) * len(self.experts) / (self.top * length)
        p = (scores / scores.sum(-1, keepdim=True) * real).sum(1) / length
        return out, (f * p).sum(-1)  # one balance term per sequence


class MoETransformer(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.embed, self.rnn, self.moe = nn.Embedding(VOCAB, dim), nn.GRU(dim, dim, batch_first=True), MoE(dim)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids, mask):
        h, _ = self.rnn(self.embed(ids))
        moe, balance = self.moe(h, mask)
        return self.head(h + moe), balance


b, k = flags()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = MoETransformer().double()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
window = []
for batch in DataLoader(sentences(80)[rank::world], batch_size=b, collate_fn=collate):
    window.append(batch)
    if len(window) < k:
        continue
    totals = torch.tensor([sum(targets(m) for m in window), sum(len(m["labels"]) for m in window)])
    if world > 1:
        dist.all_reduce(totals)
    tokens, sequences = totals.tolist()
    for m in window:
        logits, balance = model(m["input_ids"], m["attention_mask"])
        (next_token_sum(logits, m) / tokens + 0.05 * balance.sum() / sequences).backward()
    for p in model.parameters():
        if world > 1:
            dist.all_reduce(p.grad)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    window = []
