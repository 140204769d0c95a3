"""Fault: the utterances are compared with the speaker centroids of all processes (GE2E), but all_gather returns those
of the other processes without a graph: an embedding gets no gradient from the others' utterances."""

# expect 8x1x2: gathered_without_gradient
# expect 4x1x4: gathered_without_gradient
# blind 7
# thorough
# open
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
b, k = flags()
assert k == 1, "GE2E needs the speakers of a step in one batch"
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")

SPEAKERS, UTTERANCES, FRAMES, MELS = 64, 3, 10, 6
g = torch.Generator().manual_seed(1)
voices = torch.randn(SPEAKERS, 1, 1, MELS, generator=g, dtype=torch.float64)
mels = voices + torch.randn(SPEAKERS, UTTERANCES, FRAMES, MELS, generator=g, dtype=torch.float64)


class SpeakerEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(MELS, 16, batch_first=True)
        self.proj = nn.Linear(16, 12)
        self.w = nn.Parameter(torch.tensor(5.0))
        self.b = nn.Parameter(torch.tensor(-2.0))

    def forward(self, mels):
        n, m = mels.shape[:2]
        hidden = self.lstm(mels.flatten(0, 1))[1][0][-1]
        return F.normalize(self.proj(hidden), dim=1).view(n, m, -1), self.w, self.b


def gather_centroids(centroids):
    if world == 1:
        return centroids
    everyone = [torch.zeros_like(centroids) for _ in range(world)]
    dist.all_gather(everyone, centroids.detach())
    everyone[rank] = centroids  # the own ones keep their graph
    return torch.cat(everyone)


def ge2e_loss(emb, w, b):
    n, m, d = emb.shape
    centroids = gather_centroids(F.normalize(emb.mean(1), dim=1))
    sim = w * emb.reshape(n * m, d) @ centroids.t() + b
    target = (rank * n + torch.arange(n)).repeat_interleave(m)
    return F.cross_entropy(sim, target)


model = SpeakerEncoder().double()
if world > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(mels)
loader = DataLoader(data, batch_size=b, sampler=DistributedSampler(data, world, rank, shuffle=False))
for (batch,) in loader:
    optimizer.zero_grad()
    ge2e_loss(*model(batch)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 3.0)
    optimizer.step()
