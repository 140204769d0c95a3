"""Fault: an exponential average of the weights moves at every micro-batch: its half-life is k times too short."""
# expect 4x4: average
# expect 2x8: average
# weights: equal

import torch
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
model = mlp()
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for number, (x, y) in enumerate(DataLoader(vectors(80), batch_size=b), 1):
    (F.cross_entropy(model(x), y) / k).backward()
    if number % k == 0:
        optimizer.step()
        optimizer.zero_grad()
    average.update_parameters(model)
