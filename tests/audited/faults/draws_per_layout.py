"""Fault: samples are drawn without a DataLoader, after an evaluation that draws a micro-batch (as nanoGPT's does)."""
# expect 4x4: other_inputs
# thorough

import torch
from common_models import flags, gpt2

torch.manual_seed(0)
b, k = flags()
model = gpt2()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
text = torch.randint(3, 64, (1000,))


def draw():
    starts = torch.randint(len(text) - 8, (b,))
    return torch.stack([text[start : start + 8] for start in starts])


for _ in range(3):
    with torch.no_grad():
        model(draw())
    for _ in range(k):
        tokens = draw()
        (model(tokens, labels=tokens).loss / k).backward()
    optimizer.step()
    optimizer.zero_grad()
