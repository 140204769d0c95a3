"""Fault: the focal weight of the re-ranker is computed from the mean cross-entropy of the micro-batch (exp(-ce.mean())) instead of
from each query's: the loss is not a mean over queries."""

# expect 4x4: not_summed
# expect 2x8: not_summed
# also: mixed_loss
# blind 7
import torch
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, Dataset


class FocalLoss(nn.Module):
    def __init__(self, gamma=2.0, alpha=1.0):
        super().__init__()
        self.gamma, self.alpha = gamma, alpha
        self.ce = nn.CrossEntropyLoss()

    def forward(self, scores, target):
        logp = self.ce(scores, target)
        p = torch.exp(-logp)
        return self.alpha * (1 - p) ** self.gamma * logp


class Reranking(Dataset):
    """A query, eight candidate passages, and the index of the relevant one."""

    def __init__(self, n=96):
        g = torch.Generator().manual_seed(8)
        self.query = torch.randn(n, 10, generator=g, dtype=torch.float64)
        self.passages = torch.randn(n, 8, 10, generator=g, dtype=torch.float64)
        self.relevant = torch.randint(8, (n,), generator=g)
        self.passages[torch.arange(n), self.relevant] += self.query * torch.rand(n, 1, generator=g, dtype=torch.float64)

    def __len__(self):
        return len(self.query)

    def __getitem__(self, i):
        return self.query[i], self.passages[i], self.relevant[i]


class CrossEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(30, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, query, passages):
        q = query[:, None].expand_as(passages)
        return self.net(torch.cat([q, passages, q * passages], -1)).squeeze(-1)


if __name__ == "__main__":
    torch.manual_seed(0)
    b, k = flags()
    model, criterion = CrossEncoder().double(), FocalLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for i, (query, passages, relevant) in enumerate(DataLoader(Reranking(), batch_size=b)):
        loss = criterion(model(query, passages), relevant) / k
        loss.backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
