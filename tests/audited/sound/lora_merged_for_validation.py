"""LoRA by hand as a parametrization of frozen weights, with a higher rate for B than for A; the product is cached within a forward,
and after every second step the adapters are merged into a plain model for a validation. Only A, B and the head are trained."""
# expect 4x4: exact
# expect 2x8: exact
# thorough
# blind 6

import torch
import torch.nn.functional as F
from common_models import collate, flags, sentences
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader


class LowRank(nn.Module):
    def __init__(self, weight, r=2, alpha=8):
        super().__init__()
        out, inside = weight.shape
        self.A = nn.Parameter(torch.randn(r, inside, dtype=weight.dtype) / inside**0.5)
        self.B = nn.Parameter(torch.zeros(out, r, dtype=weight.dtype))
        self.scale = alpha / r**0.5  # rank-stabilised

    def forward(self, weight):
        return weight + self.scale * self.B @ self.A


class Encoder(nn.Module):
    def __init__(self, d=12, classes=3):
        super().__init__()
        self.words = nn.Embedding(64, d)
        self.q, self.key, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.head = nn.Linear(d, classes)

    def forward(self, ids, mask):
        x = self.words(ids)
        scores = self.q(x) @ self.key(x).transpose(1, 2) / x.shape[-1] ** 0.5
        x = x + scores.masked_fill(mask[:, None] == 0, -torch.inf).softmax(-1) @ self.v(x)
        m = mask[..., None].to(x.dtype)
        return self.head((x * m).sum(1) / m.sum(1))


@torch.no_grad()
def merged(model):
    plain = Encoder().double()
    for name, child in model.named_children():
        for kind in ("weight", "bias") if name != "words" else ("weight",):
            getattr(getattr(plain, name), kind).copy_(getattr(child, kind))
    return plain.eval()


torch.manual_seed(0)
b, k = flags()
model = Encoder().double().requires_grad_(False)
for layer in (model.q, model.v):
    parametrize.register_parametrization(layer, "weight", LowRank(layer.weight))
model.head.requires_grad_(True)
named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(
    [
        {"params": [p for n, p in named if n.endswith(".B")], "lr": 1.6e-2},
        {"params": [p for n, p in named if not n.endswith(".B")], "lr": 1e-3},
    ],
    weight_decay=0.0,
)
data = sentences(112, kind="cls")
train, validation = data[:96], collate(data[96:])
steps, best = 0, float("inf")
for i, batch in enumerate(DataLoader(train, batch_size=b, collate_fn=collate), 1):
    with parametrize.cached():
        logits = model(batch["input_ids"], batch["attention_mask"])
        (F.cross_entropy(logits, batch["labels"], reduction="sum") / (b * k)).backward()
    if i % k == 0:
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps % 2 == 0:
            with torch.no_grad():
                logits = merged(model)(validation["input_ids"], validation["attention_mask"])
                best = min(best, F.cross_entropy(logits, validation["labels"]).item())
