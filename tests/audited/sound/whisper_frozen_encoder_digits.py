"""Sound: Whisper with a frozen encoder learns four spoken digits: targets of one length, so that means of means are exact."""
# expect 4x4: exact
# expect 2x8: exact
# blind 8
# thorough

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common_models import flags
from media_models import EOS, Utterances, whisper
from torch.utils.data import DataLoader

b, k = flags()
torch.manual_seed(0)

model = whisper()

model.freeze_encoder()


def collate(rows):
    features = torch.stack([F.pad(mel, (0, 60 - mel.size(1))) for mel, _ in rows])
    labels = torch.stack(
        [torch.cat([torch.tensor([3, 4]), words[:1].repeat(4), torch.tensor([EOS])]) for _, words in rows]
    )
    return {"input_features": features, "labels": labels}


accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Utterances(27), batch_size=b, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
