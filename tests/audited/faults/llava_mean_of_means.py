"""Fault: LLaVA with accelerator.accumulate: means over answers of different lengths are averaged."""
# expect 4x4: mean_of_means
# expect 2x8: mean_of_means
# blind 8
# thorough

import torch
from accelerate import Accelerator
from common_models import flags
from media_models import EOS, IMAGE, Questions, llava
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

b, k = flags()
torch.manual_seed(0)

model = llava()


def collate(rows):
    ids = [torch.cat([torch.full((4,), IMAGE), question, answer, torch.tensor([EOS])]) for _, question, answer in rows]
    labels = [
        row.clone().index_fill_(0, torch.arange(len(row) - len(a) - 1), -100) for row, (_, _, a) in zip(ids, rows)
    ]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "pixel_values": torch.stack([picture for picture, _, _ in rows]),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Questions(32), batch_size=b, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
