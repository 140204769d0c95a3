"""Exact: Accelerate's documented loop on 80 samples of one length (equal counts in all micro-batches)."""
# expect 4x4: exact
# expect 2x8: exact
# thorough

import torch
from accelerate import Accelerator
from common_models import collate, flags, gpt2, sentences
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
model = gpt2()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(sentences(80, low=12, high=12), batch_size=b, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
accelerator.end_training()
