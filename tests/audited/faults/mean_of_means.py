"""Fault: the mean over each micro-batch's own tokens, divided by k: tokens of short micro-batches weigh more."""
# expect 4x4: mean_of_means

import torch
from common_models import collate, flags, gpt2, sentences
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
model = gpt2()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(sentences(80), batch_size=b, collate_fn=collate)
for i, batch in enumerate(loader):
    loss = model(**batch).loss / k
    loss.backward()
    if (i + 1) % k == 0 or i + 1 == len(loader):
        optimizer.step()
        optimizer.zero_grad()
