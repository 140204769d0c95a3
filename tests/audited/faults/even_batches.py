"""Fault (on several processes only): a prepared loader (even_batches=True) repeats samples to even out 77 over the processes.
The loss is a sum over a constant (b, then k by Accelerate, then N by DDP: 16), so nothing else depends on the cut."""
# expect 4x4: exact
# expect 8x1x2: duplicated

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common_models import flags, mlp, vectors
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(vectors(77), batch_size=b)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(x), y, reduction="sum") / b
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
accelerator.end_training()
