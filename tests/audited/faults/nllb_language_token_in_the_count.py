"""Fault: NLLB: the language token in front of each target is forced at generation and gets no loss, but the mean of each
micro-batch counts it."""
# expect 4x4: mean_of_means
# expect 2x8: mean_of_means
# blind 8
# thorough

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common_models import flags
from media_models import bart, translations
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

b, k = flags()
torch.manual_seed(0)
EOS, LANGUAGE = 2, 3


model = bart()


def collate(rows):
    source = pad_sequence([s for s, _ in rows], batch_first=True, padding_value=1)
    targets = [torch.cat([torch.tensor([LANGUAGE]), t, torch.tensor([EOS])]) for _, t in rows]
    labels = pad_sequence(targets, batch_first=True, padding_value=-100)
    return {"input_ids": source, "attention_mask": (source != 1).long(), "labels": labels}


accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(
    model, optimizer, DataLoader(translations(16), batch_size=b, collate_fn=collate)
)
for batch in loader:
    with accelerator.accumulate(model):
        labels = batch["labels"]
        logits = model(**batch).logits
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        losses = losses.masked_fill(labels == LANGUAGE, 0.0)
        accelerator.backward(losses.sum() / (labels != -100).sum())
        optimizer.step()
        optimizer.zero_grad()
