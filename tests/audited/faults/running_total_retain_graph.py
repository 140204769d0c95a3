"""Fault: the running total of a window is backwarded at every micro-batch (retain_graph=True): the first one is
added k times, the last once."""
# expect 4x4: counted_again
# expect 2x8: counted_again
# thorough
# also: not_a_sum
# blind 1

import torch
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader

b, k = flags()
torch.manual_seed(0)
TOPICS = 7


def documents(n=80):
    g = torch.Generator().manual_seed(23)
    rows = []
    for _ in range(n):
        words = torch.randint(50, (int(torch.randint(3, 15, (), generator=g)),), generator=g)
        rows.append((words, (torch.rand(TOPICS, generator=g) < 0.3).double()))
    return rows


def collate(rows):
    words, topics = zip(*rows)
    lengths = torch.tensor([0] + [len(w) for w in words[:-1]])
    return torch.cat(words), lengths.cumsum(0), torch.stack(topics)


class TopicClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 16, mode="mean")
        self.classify = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, TOPICS))

    def forward(self, words, offsets):
        return self.classify(self.bag(words, offsets))


model = TopicClassifier().double()
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
total_loss = 0.0
for i, (words, offsets, topics) in enumerate(DataLoader(documents(), batch_size=b, collate_fn=collate)):
    total_loss = total_loss + criterion(model(words, offsets), topics) / k
    total_loss.backward(retain_graph=True)  # "Trying to backward through the graph a second time" without it
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
        total_loss = 0.0
