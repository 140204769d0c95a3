"""Late interaction with the negatives of each question itself: only its own passages are compared; padded words neither
ask nor answer, and the maximum over the words of a passage leaves padding out."""

# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# thorough
# blind 6
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import VOCAB, flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

PASSAGES = 4  # the first is the right one


def questions(n=80):
    g = torch.Generator().manual_seed(2)

    def words(low, high):
        return torch.randint(1, VOCAB, (int(torch.randint(low, high, (), generator=g)),), generator=g)

    return [(words(2, 7), [words(4, 18) for _ in range(PASSAGES)]) for _ in range(n)]


def collate(samples):
    q = pad_sequence([s[0] for s in samples], batch_first=True)
    p = pad_sequence([w for s in samples for w in s[1]], batch_first=True)
    return q, p.view(len(samples), PASSAGES, -1)


class ColBERT(nn.Module):
    def __init__(self, dim=16, out=8):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim, padding_idx=0)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)
        self.proj = nn.Linear(dim, out, bias=False)

    def encode(self, ids):
        mask = (ids != 0).unsqueeze(-1)
        x = self.emb(ids)
        h = self.conv(x.transpose(1, 2)).transpose(1, 2).tanh() * mask
        return F.normalize(self.proj(x + h), dim=-1, eps=1e-6) * mask

    def forward(self, q, p):
        Q = self.encode(q)
        P = self.encode(p.flatten(0, 1)).view(*p.shape, -1)
        sim = torch.einsum("bqd,bpwd->bpqw", Q, P)
        sim = sim.masked_fill((p == 0)[:, :, None, :], -1e4)
        best = sim.amax(-1) * (q != 0)[:, None, :]
        return best.sum(-1)


def main():
    b, k = flags()
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    torch.manual_seed(0)
    model = ColBERT().double()
    if world > 1:
        dist.init_process_group("gloo")
        model = DDP(model)
    data = questions()
    loader = DataLoader(data, b, sampler=DistributedSampler(data, world, rank, shuffle=False), collate_fn=collate)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for i, (q, p) in enumerate(loader, 1):
        if world > 1:
            model.require_backward_grad_sync = i % k == 0
        scores = model(q, p) * 4
        loss = F.cross_entropy(scores, torch.zeros(len(q), dtype=torch.long), label_smoothing=0.05)
        (loss / k).backward()
        if i % k == 0:
            optimizer.step()
            optimizer.zero_grad()


main()
