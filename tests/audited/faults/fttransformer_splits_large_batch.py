"""Fault: a large batch is split into len(batch) // b micro-batches of b rows: what is left of the last, smaller batch
of an epoch is never seen."""

# expect 4x4: dropped
# expect 8x2: dropped
# expect 2x8: exact
# blind 7
# thorough
import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
b, k = flags()
ROWS, NUMERIC, CARDINALITIES = 58, 4, (7, 5, 3)


def adult_income():
    g = torch.Generator().manual_seed(1)
    numeric = torch.randn(ROWS, NUMERIC, generator=g, dtype=torch.float64)
    categorical = torch.stack([torch.randint(c, (ROWS,), generator=g) for c in CARDINALITIES], 1)
    target = (numeric.sum(1) + categorical[:, 0] - 3 > 0).double()
    return TensorDataset(numeric, categorical, target)


class FeatureTokenizer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUMERIC, dim) / dim**0.5)
        self.tables = nn.ModuleList(nn.Embedding(c, dim) for c in CARDINALITIES)

    def forward(self, numeric, categorical):
        tokens = [numeric[..., None] * self.weight]
        tokens += [t(categorical[:, j])[:, None] for j, t in enumerate(self.tables)]
        return torch.cat(tokens, 1)


class FTTransformer(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.tokens = FeatureTokenizer(dim)
        self.block = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(dim, 1)

    def forward(self, numeric, categorical):
        return self.head(self.block(self.tokens(numeric, categorical)).mean(1)).squeeze(1)


model = FTTransformer().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    loader = DataLoader(adult_income(), batch_size=b * k, shuffle=True, generator=torch.Generator().manual_seed(epoch))
    for numeric, categorical, target in loader:
        n_micro = max(1, len(target) // b)
        for j in range(n_micro):
            rows = slice(j * b, (j + 1) * b)
            logits = model(numeric[rows], categorical[rows])
            (F.binary_cross_entropy_with_logits(logits, target[rows]) / n_micro).backward()
        optimizer.step()
        optimizer.zero_grad()
