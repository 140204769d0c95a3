"""Sound: every epoch has an order, a shortened last window and an AdamW of its own; drop path is decided by
sample and epoch; EMA moves per step, SWA per epoch, and the next epoch goes on from the EMA."""
# expect 4x4: exact
# expect 2x8: exact
# blind 1
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset


class Indexed(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        return i, *self.samples[i]


class Mixer(nn.Module):
    def __init__(self, depth=3, drop=0.3):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(12, 24), nn.Linear(24, 5), drop
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24), nn.GELU()) for _ in range(depth))

    def forward(self, x, keep=None):
        h = self.first(x)
        for number, block in enumerate(self.blocks):
            scale = 1.0 if keep is None else keep[:, number, None] / (1 - self.drop)
            h = h + scale * block(h)
        return self.last(h)

    def paths(self, indices, epoch):
        """Which blocks each sample passes: the same in whatever micro-batch it comes."""
        seeds = [torch.Generator().manual_seed(7919 * epoch + i) for i in indices.tolist()]
        return torch.stack([torch.rand(len(self.blocks), generator=g) for g in seeds]).gt(self.drop).double()


torch.manual_seed(0)
b, k = flags()
model = Mixer().double()
data = Indexed(vectors(77))
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
swa, history = AveragedModel(model), []
for epoch in range(3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * 0.7**epoch)
    order = torch.randperm(77, generator=torch.Generator().manual_seed(epoch)).tolist()
    for start in range(0, 77, b * k):
        window = order[start : start + b * k]
        for indices, x, y in DataLoader(data, batch_size=b, sampler=window):
            loss = F.cross_entropy(model(x, model.paths(indices, epoch)), y, reduction="sum")
            (loss / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update_parameters(model)
    swa.update_parameters(model)
    model.load_state_dict(ema.module.state_dict())
    history.append(optimizer)
