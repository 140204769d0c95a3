"""Sound: soft prompts in full precision in front of a frozen language model with bfloat16 weights; token sums are divided by the tokens of the step on all processes; only the prompt is reduced."""
# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: exact
# blind 5
# thorough

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.utils.rnn import pad_sequence

FULL = os.environ.get("FULL") == "1"
low, high = (torch.float64, torch.float64) if FULL else (torch.bfloat16, torch.float32)
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
VOCAB, WIDTH = 48, 32


class FrozenLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.lm_head = nn.Linear(WIDTH, VOCAB)

    def forward(self, inputs_embeds):
        return self.lm_head(self.rnn(inputs_embeds)[0])


class PromptEncoder(nn.Module):
    """A prompt of virtual tokens, reparametrized by an MLP."""

    def __init__(self, tokens=4):
        super().__init__()
        self.embedding = nn.Embedding(tokens, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, batch):
        return self.mlp(self.embedding.weight).expand(batch, -1, -1)


b, k = flags()
g = torch.Generator().manual_seed(84)
texts = [torch.randint(VOCAB, (int(torch.randint(5, 16, (), generator=g)),), generator=g) for _ in range(80)]
torch.manual_seed(0)
lm, prompt = FrozenLM().to(low).requires_grad_(False), PromptEncoder().to(high)
optimizer = torch.optim.AdamW(prompt.parameters(), lr=5e-3, eps=1e-3)
if world > 1:
    dist.init_process_group("gloo")
for step in range(5):
    tokens = sum(len(t) for t in texts[step * 16 : step * 16 + 16])
    for micro in range(k):
        start = step * 16 + (micro * world + rank) * b
        ids = pad_sequence(texts[start : start + b], batch_first=True)
        labels = pad_sequence(texts[start : start + b], batch_first=True, padding_value=-100)
        virtual = prompt(len(ids)).to(low)
        logits = lm(torch.cat([virtual, lm.wte(ids)], 1))[:, virtual.shape[1] - 1 : -1]
        loss = F.cross_entropy(logits.to(high).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        (loss / tokens).backward()
    if world > 1:
        for p in prompt.parameters():
            dist.all_reduce(p.grad)
    nn.utils.clip_grad_norm_(prompt.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
