"""Fault: of two optimizers the smaller one, of the head, is emptied at every micro-batch."""
# expect 4x4: emptied_between
# expect 2x8: emptied_between
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
model = mlp()
body = torch.optim.AdamW(model[:-1].parameters(), lr=0.01)
head = torch.optim.SGD(model[-1].parameters(), lr=0.05)
for number, (x, y) in enumerate(DataLoader(vectors(80), batch_size=b), 1):
    head.zero_grad()
    (F.cross_entropy(model(x), y) / k).backward()
    if number % k == 0:
        body.step()
        head.step()
        body.zero_grad()
