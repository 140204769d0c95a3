"""Sound: Whisper: each utterance is padded to the encoder's full length, as its processor does, without a mask: the same
under each cut."""
# expect 4x4: exact
# expect 2x8: exact
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

model = whisper()


def collate(rows):
    features = torch.stack([F.pad(mel, (0, 60 - mel.size(1)), value=-1.5) for mel, _ in rows])
    targets = [torch.cat([torch.tensor([3, 4]), words, torch.tensor([EOS])]) for _, words in rows]
    labels = pad_sequence(targets, batch_first=True, padding_value=-100)
    return {"input_features": features, "labels": labels}


accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Utterances(26, 77), batch_size=b, collate_fn=collate)
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
