"""Fault: at every tenth batch the loader's next batch is drawn for a picture in the log, and is not trained on."""
# expect 4x4: other_samples
# expect 2x8: other_samples
# also: dropped
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, images
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
net = nn.Sequential(nn.Flatten(), nn.Linear(72, 7), nn.ReLU(), nn.Linear(7, 5)).double()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
stream, number, pictures = iter(DataLoader(images(128), batch_size=b)), 0, []
for x, y in stream:
    number += 1
    (F.cross_entropy(net(x), y) / k).backward()
    if number % k == 0:
        optimizer.step()
        optimizer.zero_grad()
    if number % 10 == 0 and (sample := next(stream, None)) is not None:
        pictures.append(sample[0][:1])
