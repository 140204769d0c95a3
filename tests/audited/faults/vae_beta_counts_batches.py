"""Fault: the weight of a VAE's KL is warmed up by the number of batches, so that micro-batches of one step have several."""
# expect 4x4: ticks_per_micro_step
# expect 2x8: ticks_per_micro_step
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
encoder, decoder = nn.Linear(12, 8).double(), nn.Linear(4, 12).double()
model = nn.ModuleList([encoder, decoder])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
step = 0
for number, (x, _) in enumerate(DataLoader(vectors(), batch_size=b), 1):
    mu, log_variance = encoder(x).chunk(2, 1)
    kl = 0.5 * (mu.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
    reconstruction = F.mse_loss(decoder(mu), x)
    beta = min(1.0, step / 10)
    step += 1
    ((reconstruction + beta * kl) / k).backward()
    if number % k == 0:
        optimizer.step()
        optimizer.zero_grad()
