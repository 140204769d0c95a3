"""Speaker vectors from statistics pooling (mean and deviation) over an utterance's own frames, behind dilated convolutions whose
padding is set to zero again after every layer, and additive margins: padding changes nothing, whatever it is padded to."""
# expect 4x4: exact
# expect 2x8: exact
# thorough
# blind 6

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader


class TDNN(nn.Module):
    def __init__(self, mels=5, width=8, speakers=6, margin=0.2, scale=10.0):
        super().__init__()
        sizes = [(mels, width, 1), (width, width, 2), (width, width, 3)]
        self.layers = nn.ModuleList(nn.Conv1d(i, o, 3, padding=d, dilation=d) for i, o, d in sizes)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in sizes)
        self.embed = nn.Linear(2 * width, width)
        self.speakers = nn.Parameter(torch.randn(speakers, width))
        self.margin, self.scale = margin, scale

    def forward(self, x, lengths):
        mask = (torch.arange(x.shape[1]) < lengths[:, None])[:, None].to(x.dtype)
        x = x.transpose(1, 2) * mask
        for layer, norm in zip(self.layers, self.norms):
            x = norm(F.relu(layer(x)).transpose(1, 2)).transpose(1, 2) * mask
        n = lengths[:, None].to(x.dtype)
        mean = x.sum(2) / n
        var = (((x - mean[..., None]) * mask) ** 2).sum(2) / (n - 1)
        return self.embed(torch.cat([mean, (var + 1e-5).sqrt()], 1))

    def loss(self, vectors, who):
        cosine = F.normalize(vectors) @ F.normalize(self.speakers).T
        return F.cross_entropy(self.scale * (cosine - self.margin * F.one_hot(who, cosine.shape[1])), who)


def utterances(n):
    g = torch.Generator().manual_seed(12)
    for _ in range(n):
        frames = int(torch.randint(9, 40, (), generator=g))
        yield torch.randn(frames, 5, generator=g, dtype=torch.float64), int(torch.randint(6, (), generator=g))


def collate(items):
    longest = -(-max(len(x) for x, _ in items) // 8) * 8  # a multiple of eight
    x = torch.full((len(items), longest, 5), -11.5, dtype=torch.float64)  # the log of nothing
    for row, (feats, _) in zip(x, items):
        row[: len(feats)] = feats
    return x, torch.tensor([len(f) for f, _ in items]), torch.tensor([w for _, w in items])


torch.manual_seed(0)
b, k = flags()
model = TDNN().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3)
for i, (x, lengths, who) in enumerate(DataLoader(list(utterances(96)), batch_size=b, collate_fn=collate), 1):
    (model.loss(model(x, lengths), who) / k).backward()
    if i % k == 0:
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
