"""Sound: REINFORCE with a GRU; advantages are centred and scaled over the whole step's episodes before it is
cut into micro-batches."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# blind 2
# thorough

import os

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()

g = torch.Generator().manual_seed(39)
seen = torch.randn(80, 14, 5, generator=g).to(dtype)  # a fixed log of episodes: off-policy enough for a test
actions = torch.randint(3, (80, 14), generator=g)
ends = torch.randint(4, 15, (80,), generator=g)
alive = torch.arange(14) < ends[:, None]
rewards = (torch.where(actions == 1, 1.0, -0.3) * alive).to(dtype)
to_go = rewards.flip(1).cumsum(1).flip(1)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory, self.act = nn.GRU(5, 24, batch_first=True), nn.Linear(24, 3)

    def forward(self, seen):
        return self.act(self.memory(seen)[0])


torch.manual_seed(0)
policy = Policy().to(dtype)
optimizer = torch.optim.RMSprop(policy.parameters(), lr=1e-3, eps=1e-3)
if world > 1:
    dist.init_process_group("gloo")
for step in range(5):
    everyone = slice(step * 16, step * 16 + 16)
    known = to_go[everyone][alive[everyone]]  # returns need no policy: each process knows all of them
    mean, deviation, moves = known.mean(), known.std(), len(known)
    for micro in range(k):
        start = step * 16 + (micro * world + rank) * b
        rows = slice(start, start + b)
        with torch.autocast("cpu", torch.bfloat16, enabled=not FULL):
            logits = policy(seen[rows])
        log_p = logits.to(dtype).log_softmax(-1)
        chosen = log_p.gather(-1, actions[rows][..., None]).squeeze(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        advantage = (to_go[rows] - mean) / (deviation + 1e-6)
        loss = -((advantage * chosen + 0.01 * entropy) * alive[rows]).sum() / moves
        loss.backward()
    if world > 1:
        for p in policy.parameters():
            dist.all_reduce(p.grad)
    nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
