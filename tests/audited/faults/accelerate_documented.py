"""Fault: Accelerate's documented loop on ragged samples: a mean of the micro-batches' (and processes') means."""
# expect 4x4: mean_of_means
# expect 2x8: mean_of_means
# thorough
# also: tail, duplicated

import torch
from accelerate import Accelerator
from common_models import collate, flags, gpt2, sentences
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
model = gpt2()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(sentences(77), batch_size=b, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
accelerator.end_training()
