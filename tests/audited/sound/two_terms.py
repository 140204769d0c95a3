"""Exact: two terms with two denominators: masked tokens and sentence pairs, both counted over the window; 77
ragged samples."""
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
model = bert("BertForPreTraining")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = iter(DataLoader(sentences(77, kind="mlm"), batch_size=b, collate_fn=collate))
while window := list(islice(batches, k)):
    tokens = sum(int((m["labels"] != -100).sum()) for m in window)
    pairs = sum(len(m["next_sentence_label"]) for m in window)
    for m in window:
        out = model(input_ids=m["input_ids"], attention_mask=m["attention_mask"])
        mlm = F.cross_entropy(out.prediction_logits.flatten(0, 1), m["labels"].flatten(), reduction="sum")
        nsp = F.cross_entropy(out.seq_relationship_logits, m["next_sentence_label"], reduction="sum")
        (mlm / tokens + nsp / pairs).backward()
    optimizer.step()
    optimizer.zero_grad()
