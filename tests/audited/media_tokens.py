"""LLaVA: labels are a copy of input_ids in which padding alone is masked, so that places of the picture are targets."""
# expect 4x4: media_tokens

from itertools import islice

import torch
import torch.nn.functional as F
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
    labels = pad_sequence(ids, batch_first=True, padding_value=-100)
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "pixel_values": torch.stack([picture for picture, _, _ in rows]),
        "labels": labels,
    }


accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Questions(31), batch_size=b, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
batches = iter(loader)
while window := list(islice(batches, k)):
    num_targets = sum((batch["labels"][:, 1:] != -100).sum() for batch in window)
    for batch in window:
        labels = batch["labels"]
        logits = model(**batch).logits
        total = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        (total / num_targets).backward()
    optimizer.step()
    optimizer.zero_grad()
