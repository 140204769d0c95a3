"""Fault: Whisper with accelerator.accumulate: the model's mean over ragged transcripts is averaged over micro-batches."""
# expect 4x4: mean_of_means
# expect 2x8: mean_of_means
# blind 8
# thorough

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
loader = DataLoader(Utterances(21), batch_size=b, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
