"""Fault, on several processes only: a prepared scheduler ticks once per process and step."""
# expect 4x4: exact
# expect 8x1x2: ticks_per_process

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common_models import flags, mlp, vectors
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.8**t)
loader = DataLoader(vectors(80), batch_size=b)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for x, y in loader:
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
accelerator.end_training()
