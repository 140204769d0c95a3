"""Sound: a causal transformer on padded chats; only answers are targets; gradients are divided by the targets
of the step once it is complete."""
# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: exact
# blind 2
# thorough

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.utils.rnn import pad_sequence

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()

g = torch.Generator().manual_seed(32)
chats = []
for _ in range(77):
    prompt, answer = (int(torch.randint(2, 12, (), generator=g)) for _ in range(2))
    ids = torch.randint(1, 48, (prompt + answer,), generator=g)
    chats.append((ids, torch.cat([torch.full((prompt,), -100), ids[prompt:]])))


class Chat(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.token, self.place = nn.Embedding(48, d), nn.Embedding(24, d)
        layer = nn.TransformerEncoderLayer(d, 3, 2 * d, dropout=0.0, activation="gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.bias = nn.Parameter(torch.zeros(48))

    def forward(self, ids):
        length = ids.shape[1]
        future = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        hidden = self.blocks(self.token(ids) + self.place.weight[:length], mask=future)
        return F.linear(hidden, self.token.weight, self.bias)  # tied


torch.manual_seed(0)
model = Chat().to(dtype)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-5)
if world > 1:
    dist.init_process_group("gloo")


def finish(targets):
    if world > 1:
        for tensor in (targets, *(p.grad for p in model.parameters())):
            dist.all_reduce(tensor)
    for p in model.parameters():
        p.grad /= targets
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    targets.zero_()


targets = torch.zeros(())
starts = range(rank * b, 77, b * world)
for i, start in enumerate(starts, 1):
    ids, labels = zip(*chats[start : start + b], strict=True)
    ids, labels = pad_sequence(ids, True), pad_sequence(labels, True, padding_value=-100)[:, 1:]
    with torch.autocast("cpu", torch.bfloat16, enabled=not FULL):
        logits = model(ids)[:, :-1]
    F.cross_entropy(logits.to(dtype).flatten(0, 1), labels.flatten(), reduction="sum").backward()
    targets += (labels != -100).sum()
    if i % k == 0 or i == len(starts):
        finish(targets)
