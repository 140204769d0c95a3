"""Fault: T5 translates; labels are padded with the pad token and not with -100, so that the mean counts padding."""
# expect 4x4: padding
# expect 2x8: padding
# also: counts, mean_of_means
# blind 8

import torch
from accelerate import Accelerator
from common_models import flags
from media_models import t5, translations
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

b, k = flags()
torch.manual_seed(0)
EOS = 1


model = t5()


def collate(rows):
    source = pad_sequence([s for s, _ in rows], batch_first=True, padding_value=0)
    labels = pad_sequence([torch.cat([t, torch.tensor([EOS])]) for _, t in rows], batch_first=True, padding_value=0)
    return {"input_ids": source, "attention_mask": (source != 0).long(), "labels": labels}


accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(translations(12), batch_size=b, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
