"""Exact: a classifier on ragged sentences: the sum over samples divided by the window's number of samples; 77
samples."""
# expect 4x4: exact
# expect 2x8: exact
# thorough

from itertools import islice

import torch
import torch.nn.functional as F
from common_models import bert, collate, flags, sentences
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
model = bert("BertForSequenceClassification")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
batches = iter(DataLoader(sentences(77, kind="cls"), batch_size=b, collate_fn=collate))
while window := list(islice(batches, k)):
    count = sum(len(m["labels"]) for m in window)
    for m in window:
        logits = model(input_ids=m["input_ids"], attention_mask=m["attention_mask"]).logits
        (F.cross_entropy(logits, m["labels"], reduction="sum") / count).backward()
    optimizer.step()
    optimizer.zero_grad()
