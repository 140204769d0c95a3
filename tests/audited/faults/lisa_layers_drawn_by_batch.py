"""Fault: layer-wise sampled fine-tuning (LISA) draws its active layer anew every two micro-batches instead of every two
updates: within one window several layers are switched on and off, and other layers are trained."""

# expect 4x4: parameters
# expect 2x8: parameters
# blind 7
# thorough
# open
import torch
import torch.nn.functional as F
from common_models import VOCAB, collate, flags, sentences
from torch import nn
from torch.utils.data import DataLoader


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(2 * dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        h = self.norm(x)
        seen = h.cumsum(1) / torch.arange(1, h.size(1) + 1)[:, None]
        return x + self.down(F.gelu(self.up(torch.cat([h, seen], -1))))


class Decoder(nn.Module):
    def __init__(self, dim=16, depth=6):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class LISACallback:
    def __init__(self, model, n_active=1, interval=2, seed=17):
        self.model, self.n_active, self.interval = model, n_active, interval
        self.generator = torch.Generator().manual_seed(seed)
        self.step = 0

    def on_step_begin(self):
        if self.step % self.interval == 0:
            chosen = torch.randperm(len(self.model.layers), generator=self.generator)[: self.n_active].tolist()
            for i, layer in enumerate(self.model.layers):
                layer.requires_grad_(i in chosen)
        self.step += 1


def finetune(model, data, b, k):
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    lisa = LISACallback(model)
    for i, batch in enumerate(DataLoader(data, batch_size=b, collate_fn=collate)):
        lisa.on_step_begin()
        ids = batch["input_ids"]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        (loss / k).backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    b, k = flags()
    finetune(Decoder().double(), sentences(96, low=12, high=12), b, k)
