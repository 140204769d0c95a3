"""Exact: sums over the tokens, divided by the window's number of targets; 77 ragged samples."""
# expect 4x4: exact
# expect 2x8: exact
# thorough

from itertools import islice

import torch
from common_models import collate, flags, gpt2, next_token_sum, sentences, targets
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
model = gpt2()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = iter(DataLoader(sentences(77), batch_size=b, collate_fn=collate))
while window := list(islice(batches, k)):
    count = sum(targets(m) for m in window)
    for m in window:
        logits = model(input_ids=m["input_ids"], attention_mask=m["attention_mask"]).logits
        (next_token_sum(logits, m) / count).backward()
    optimizer.step()
    optimizer.zero_grad()
