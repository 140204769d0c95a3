"""Fault: Whisper's log-mel is computed in collate for all utterances at once, and clamped at 8 below the loudest frame of
the batch, not of the utterance."""
# expect 4x4: other_inputs
# expect 2x8: other_inputs
# also: padding, mixed_samples
# blind 8
# thorough

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

model = whisper()


def collate(rows):
    mels = torch.stack([F.pad(3 * mel, (0, 60 - mel.size(1)), value=-10.0) for mel, _ in rows])
    mels = torch.maximum(mels, mels.max() - 8.0)
    mels = (mels + 4.0) / 4.0
    labels = [torch.cat([torch.tensor([3, 4]), words, torch.tensor([EOS])]) for _, words in rows]
    return {"input_features": mels, "labels": pad_sequence(labels, batch_first=True, padding_value=-100)}


accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Utterances(24), batch_size=b, collate_fn=collate)
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
