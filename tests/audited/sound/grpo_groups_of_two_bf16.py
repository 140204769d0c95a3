"""Sound: GRPO with two completions for each prompt, side by side: advantages compare only these, and every micro-batch has whole groups."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 4
# thorough

import contextlib
import copy
import os

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
GROUP, PROMPT, LENGTH, TOKENS = 2, 4, 8, 24


class Policy(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, width)
        self.conv, self.out = nn.Conv1d(width, width, 4), nn.Linear(width, TOKENS)

    def forward(self, ids):
        x = self.embed(ids).transpose(1, 2)
        return self.out(torch.tanh(self.conv(nn.functional.pad(x, (3, 0)))).transpose(1, 2))


def log_probs(model, ids):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not FULL):
        logits = model(ids[:, :-1])
    log_p = logits.to(dtype).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return log_p[:, PROMPT - 1 :]


def advantages(rewards):
    grouped = rewards.view(-1, GROUP)
    return ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-2)).flatten()


g = torch.Generator().manual_seed(27)
prompts = torch.randint(TOKENS, (40, PROMPT), generator=g).repeat_interleave(GROUP, 0)
completions = torch.cat([prompts, torch.randint(TOKENS, (80, LENGTH), generator=g)], 1)
ends = torch.randint(3, LENGTH + 1, (80,), generator=g)
rewards = (completions[:, PROMPT:] % 3 == 0).to(dtype).mean(1) + 0.1 * torch.rand(80, generator=g).to(dtype)

torch.manual_seed(0)
b, k = flags()
policy = Policy().to(dtype)
reference = copy.deepcopy(policy).requires_grad_(False)
if world > 1:
    dist.init_process_group("gloo")
    policy = DDP(policy)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, eps=1e-5)
for i, start in enumerate(range(rank * b, 80, b * world), 1):
    rows = slice(start, start + b)
    with contextlib.nullcontext() if i % k == 0 or world == 1 else policy.no_sync():
        log_p, old = log_probs(policy, completions[rows]), log_probs(reference, completions[rows])
        ratio = (log_p - old).exp()
        advantage = advantages(rewards[rows])[:, None]
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        kl = (old - log_p).exp() - (old - log_p) - 1
        mask = torch.arange(LENGTH) < ends[rows, None]
        loss = -((gain - 0.04 * kl) * mask).sum() / (b * LENGTH)  # a constant, as in Dr. GRPO
        (loss / k).backward()
    if i % k == 0:
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
