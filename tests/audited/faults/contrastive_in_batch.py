"""Fault: the other samples of the micro-batch are the negatives: 4 of them instead of 16."""
# expect 4x4: mixed_loss
# expect 2x8: mixed_loss

import torch
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for number, (x, _) in enumerate(DataLoader(vectors(80), batch_size=b), 1):
    anchors, positives = model(x), model(x.roll(1, dims=1))
    scores = F.normalize(anchors) @ F.normalize(positives).T / 0.1
    (F.cross_entropy(scores, torch.arange(len(x))) / k).backward()
    if number % k == 0:
        optimizer.step()
        optimizer.zero_grad()
