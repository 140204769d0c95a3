"""A token classifier with a schedule, clipping and an evaluation after every epoch."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.tags = nn.Embedding(50, 16), nn.Linear(16, 5)

    def forward(self, words):
        return self.tags(torch.tanh(self.words(words)))


def collate(samples):
    words, tags = zip(*samples, strict=True)
    return pad_sequence(words, batch_first=True), pad_sequence(tags, batch_first=True, padding_value=-100)


@torch.no_grad()
def validate(model, held_out):
    model.eval()
    words, tags = collate(held_out)
    logits = model(words.to(accelerator.device)).flatten(0, 1)
    loss = F.cross_entropy(logits, tags.to(accelerator.device).flatten())
    accelerator.print(f"validation loss {loss:.4f}")


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=4)
parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
args = parser.parse_args()
b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps
sentences = [(torch.arange(n) * n % 50, torch.arange(n) * n % 5) for n in (3 + 7 * number % 13 for number in range(83))]

accelerator = Accelerator(gradient_accumulation_steps=k)
torch.manual_seed(0)
model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(sentences[:77], batch_size=b, shuffle=True, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
num_steps = 2 * len(loader) // k
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.1, 1 - step / num_steps))
for epoch in range(2):
    model.train()
    for words, tags in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(words).flatten(0, 1), tags.flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                scheduler.step()
    validate(model, sentences[77:])
accelerator.end_training()
