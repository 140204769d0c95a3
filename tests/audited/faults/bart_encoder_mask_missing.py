"""Fault: BART summarises; the collator returns no attention_mask, so that the encoder and the cross-attention attend to
padding."""
# expect 4x4: padding
# expect 2x8: padding
# blind 8

from itertools import islice

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common_models import flags
from media_models import bart, translations
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

b, k = flags()
torch.manual_seed(0)
EOS = 2


model = bart()


def collate(rows):
    source = pad_sequence([s for s, _ in rows], batch_first=True, padding_value=1)
    labels = pad_sequence([torch.cat([t, torch.tensor([EOS])]) for _, t in rows], batch_first=True, padding_value=-100)
    return {"input_ids": source, "labels": labels}


accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(translations(11), batch_size=b, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
batches = iter(loader)
while window := list(islice(batches, k)):
    num_targets = sum((batch["labels"] != -100).sum() for batch in window)
    for batch in window:
        labels = batch["labels"]
        logits = model(**batch).logits
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        (total / num_targets).backward()
    optimizer.step()
    optimizer.zero_grad()
