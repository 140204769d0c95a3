"""Fault: the tabular transformer has attention between rows (as SAINT has): what a row gives depends on the other rows of its
micro-batch."""
# expect 4x4: mixed_samples
# expect 2x8: mixed_samples
# thorough
# blind 6

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader


class Attention(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        n, length, dim = x.shape
        q, key, v = self.qkv(self.norm(x)).view(n, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, key, v).transpose(1, 2).reshape(n, length, dim)
        return x + self.out(y)


class FeedForward(nn.Sequential):
    def __init__(self, dim):
        super().__init__(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        return x + super().forward(x)


class RowColTransformer(nn.Module):
    def __init__(self, columns=12, dim=4, classes=5):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(columns, dim)), nn.Parameter(torch.zeros(columns, dim))
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.col_attn, self.col_ff = Attention(dim), FeedForward(dim)
        width = (columns + 1) * dim
        self.row_attn, self.row_ff = Attention(width, heads=4), FeedForward(width)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        tokens = x[..., None] * self.scale + self.shift
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), tokens], 1)
        tokens = self.col_ff(self.col_attn(tokens))
        rows = tokens.flatten(1)[None]
        rows = self.row_ff(self.row_attn(rows))
        return self.head(rows[0].view_as(tokens)[:, 0])


torch.manual_seed(0)
b, k = flags()
model = RowColTransformer().double()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
for i, (x, y) in enumerate(DataLoader(vectors(80), batch_size=b), 1):
    loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
    (loss / k).backward()
    if i % k == 0:
        optimizer.step()
        optimizer.zero_grad()
