"""Fault: the loss is the mean over the masked patches of a micro-batch, divided by k, though images have
different numbers of masked patches."""
# expect 4x4: mean_of_means
# expect 2x8: mean_of_means
# expect 8x1x2: mean_of_means
# expect 4x2x2: mean_of_means
# blind 3
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
PATCHES, WIDTH, CODES = 16, 24, 10


class Patches(Dataset):
    def __init__(self, n=80):
        g = torch.Generator().manual_seed(33)
        self.codes = torch.randint(CODES, (n, PATCHES), generator=g)
        looks = torch.randn(CODES, 12, generator=g)
        self.pixels = (looks[self.codes] + 0.3 * torch.randn(n, PATCHES, 12, generator=g)).to(dtype)
        hidden = 12 + (torch.rand(n, generator=g) < 0.7).long()
        self.masks = torch.stack([torch.rand(PATCHES, generator=g).argsort() < h for h in hidden])

    def __len__(self):
        return len(self.codes)

    def __getitem__(self, i):
        return self.pixels[i], self.masks[i], self.codes[i]


class Beit(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mask_token = nn.Linear(12, WIDTH), nn.Parameter(torch.randn(WIDTH) * 0.02)
        self.place = nn.Parameter(torch.randn(PATCHES, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(WIDTH, CODES)

    def forward(self, pixels, mask):
        x = torch.where(mask[..., None], self.mask_token, self.embed(pixels).to(self.mask_token.dtype))
        return self.head(self.encoder(x + self.place)[mask])


b, k = flags()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(0)
model, data = Beit().to(dtype), Patches()
if world > 1:
    dist.init_process_group("gloo")
    model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
loader = DataLoader(data, batch_size=b, sampler=DistributedSampler(data, world, rank, shuffle=False))
for i, (pixels, mask, codes) in enumerate(loader, 1):
    with contextlib.nullcontext() if i % k == 0 or world == 1 else model.no_sync():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not FULL):
            loss = F.cross_entropy(model(pixels, mask), codes[mask])
        (loss / k).backward()
    if i % k == 0:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
