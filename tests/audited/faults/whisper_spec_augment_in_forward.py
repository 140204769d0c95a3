"""Fault: Whisper masks spans of frames itself (apply_spec_augment): they are drawn at each forward, for the micro-batch."""
# expect 4x4: dropout
# expect 2x8: dropout
# also: other_inputs, state
# blind 8

from itertools import islice

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common_models import flags
from media_models import EOS, Utterances, whisper
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

b, k = flags()
torch.manual_seed(0)

model = whisper(apply_spec_augment=True, mask_time_prob=0.2, mask_time_length=3)


def collate(rows):
    features = torch.stack([F.pad(mel, (0, 60 - mel.size(1)), value=-1.5) for mel, _ in rows])
    targets = [torch.cat([torch.tensor([3, 4]), words, torch.tensor([EOS])]) for _, words in rows]
    labels = pad_sequence(targets, batch_first=True, padding_value=-100)
    return {"input_features": features, "labels": labels}


accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Utterances(23), batch_size=b, collate_fn=collate)
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
