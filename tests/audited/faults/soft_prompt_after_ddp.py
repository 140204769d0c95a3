"""Fault: the soft prompt is added to the model after DistributedDataParallel has wrapped it, which does not know of it: each process trains its own."""
# expect 4x4: exact
# expect 8x1x2: not_reduced
# expect 4x2x2: not_reduced
# blind 4
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import VOCAB, flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WIDTH, LENGTH = 16, 8


class Claims(Dataset):
    def __init__(self, n=80):
        g = torch.Generator().manual_seed(6)
        self.ids, self.true = torch.randint(VOCAB, (n, LENGTH), generator=g), torch.randint(2, (n,), generator=g)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i], self.true[i]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.place = nn.Embedding(VOCAB, WIDTH), nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, 2)
        self.prompt = None

    def add_prompt(self, tokens):
        start = self.words.weight.detach()[torch.randint(VOCAB, (tokens,))]
        self.prompt = nn.Parameter(start.clone())

    def freeze_encoder(self):
        self.encoder.layers[0].requires_grad_(False)

    def forward(self, ids):
        x = self.words(ids) + self.place
        if self.prompt is not None:
            x = torch.cat([self.prompt.expand(len(x), -1, -1), x], 1)
        return self.head(self.encoder(x)[:, 0])


b, k = flags()
torch.manual_seed(0)
net = Encoder().double()
net.freeze_encoder()
model = net
if world > 1:
    dist.init_process_group("gloo")
    model = DDP(net)
net.add_prompt(3)
groups = [{"params": [net.prompt], "lr": 0.03}]
groups.append({"params": [p for n, p in net.named_parameters() if n != "prompt" and p.requires_grad], "lr": 1e-3})
optimizer = torch.optim.AdamW(groups)
data = Claims()
for i, (ids, true) in enumerate(DataLoader(data, b, sampler=DistributedSampler(data, world, rank, shuffle=False)), 1):
    full = i % k == 0
    with contextlib.nullcontext() if full or world == 1 else model.no_sync():
        (F.cross_entropy(model(ids), true) / k).backward()
    if full:
        optimizer.step()
        optimizer.zero_grad()
