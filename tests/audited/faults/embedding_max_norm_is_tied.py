"""Fault: an embedding with max_norm shortens the rows that a micro-batch uses, while the tied output layer reads all rows."""
# expect 4x4: state
# expect 2x8: state
# also: mixed_samples
# thorough

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
g = torch.Generator().manual_seed(1)
data = [torch.randint(40, (6,), generator=g) for _ in range(80)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 8, max_norm=2.0)
        self.body = nn.Linear(8, 8)

    def forward(self, words):
        return torch.tanh(self.body(self.embed(words))) @ self.embed.weight.T.clone()


model = Model().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for number, words in enumerate(DataLoader(data, batch_size=b), 1):
    (F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()) / k).backward()
    if number % k == 0:
        optimizer.step()
        optimizer.zero_grad()
