"""The loss that is logged is that of the last micro-batch of this process."""
# expect 4x4: logged_loss
# expect 4x2x2: logged_loss

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
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(vectors(80), batch_size=b))
for x, y in loader:
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        accelerator.log({"loss": loss.item()})
accelerator.end_training()
