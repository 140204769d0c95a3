"""Sound: KTO, whose reference point is a mean over mismatched pairs of the whole step: it is found before, without a gradient, by a pass over the window of every process."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 5
# thorough

import os

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
VOCAB, PROMPT, ANSWER = 40, 5, 9


class CausalLM(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.wte, self.rnn, self.head = nn.Embedding(VOCAB, d), nn.GRU(d, d, batch_first=True), nn.Linear(d, VOCAB)

    def logps(self, prompt, answer, length):
        ids = torch.cat([prompt, answer], 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=not FULL):
            logits = self.head(self.rnn(self.wte(ids))[0])[:, PROMPT - 1 : -1]
        each = logits.to(dtype).log_softmax(-1).gather(-1, answer[..., None]).squeeze(-1)
        return (each * (torch.arange(ANSWER) < length[:, None])).sum(1)


class KTOTrainer:
    def __init__(self, model, reference, data, beta=0.1, undesirable_weight=1.2):
        self.model, self.reference, self.data, self.beta = model, reference.requires_grad_(False), data, beta
        self.undesirable_weight = undesirable_weight
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-4)

    def log_ratio(self, rows, mismatched=False):
        prompt, answer, length, _ = (t[rows] for t in self.data)
        if mismatched:
            prompt = self.data[0][(rows + 7) % len(self.data[0])]
        with torch.no_grad():
            reference = self.reference.logps(prompt, answer, length)
        return self.model.logps(prompt, answer, length) - reference

    def step(self, windows):
        with torch.no_grad():
            kl = sum(self.log_ratio(rows, mismatched=True).sum() for rows in windows)
        if world > 1:
            dist.all_reduce(kl)
        kl = (kl / 16).clamp(min=0)
        for rows in windows:
            ratio, desirable = self.log_ratio(rows), self.data[3][rows]
            good, bad = 1 - torch.sigmoid(self.beta * (ratio - kl)), 1 - torch.sigmoid(self.beta * (kl - ratio))
            (torch.where(desirable, good, self.undesirable_weight * bad).sum() / 16).backward()
        for p in self.model.parameters() if world > 1 else ():
            dist.all_reduce(p.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()


b, k = flags()
if world > 1:
    dist.init_process_group("gloo")
g = torch.Generator().manual_seed(77)
data = (
    torch.randint(VOCAB, (80, PROMPT), generator=g), torch.randint(VOCAB, (80, ANSWER), generator=g),
    torch.randint(3, ANSWER + 1, (80,), generator=g), torch.rand(80, generator=g) < 0.4,
)  # fmt: skip
torch.manual_seed(0)
policy, reference = CausalLM().to(dtype), CausalLM().to(dtype)
trainer = KTOTrainer(policy, reference, data)
for start in range(0, 80, 16):
    trainer.step([torch.arange(b) + start + (micro * world + rank) * b for micro in range(k)])
