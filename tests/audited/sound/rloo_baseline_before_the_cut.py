"""REINFORCE with a leave-one-out baseline: episodes are played before the step, each with a generator of its own, and the returns of
all processes are gathered, so that the baseline is that of the whole batch; only then is it cut. Episodes end at different times."""
# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: exact
# expect 2x4x2: exact
# thorough
# blind 6

import os

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
GLOBAL = 16
if WORLD > 1:
    dist.init_process_group("gloo")


class Cart:
    """A point on a line that is pushed left or right, in some wind; the episode ends where it leaves [-1, 1]."""

    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.state = 0.2 * torch.randn(2, generator=self.g, dtype=torch.float64)

    def step(self, action):
        wind = 0.05 * float(torch.randn((), generator=self.g))
        x, v = self.state.tolist()
        v += (0.1 if action else -0.1) + wind
        self.state = torch.tensor([x + v, v], dtype=torch.float64)
        return 1.0 - abs(x + v), abs(x + v) > 1.0


@torch.no_grad()
def play(policy, seed, limit=25):
    env, states, actions, total = Cart(seed), [], [], 0.0
    for _ in range(limit):
        probs = policy(env.state).softmax(-1)
        action = int(torch.rand((), generator=env.g, dtype=torch.float64) > probs[0])
        states.append(env.state)
        actions.append(action)
        reward, done = env.step(action)
        total += reward
        if done:
            break
    return torch.stack(states), torch.tensor(actions), total


def gathered(value):
    if WORLD == 1:
        return value
    parts = [torch.empty_like(value) for _ in range(WORLD)]
    dist.all_gather(parts, value)
    return torch.cat(parts)


torch.manual_seed(0)
b, k = flags()
policy = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)).double()
optimizer = torch.optim.RMSprop(policy.parameters(), lr=3e-3)
for update in range(5):
    episodes = [play(policy, 1000 * update + i) for i in range(RANK, GLOBAL, WORLD)]
    own = torch.tensor([e[2] for e in episodes], dtype=torch.float64)
    everyone = gathered(own)
    advantages = own - (everyone.sum() - own) / (GLOBAL - 1)
    advantages = advantages / (everyone.std() + 1e-8)
    for first in range(0, len(episodes), b):
        chunk = episodes[first : first + b]
        states, actions = torch.cat([e[0] for e in chunk]), torch.cat([e[1] for e in chunk])
        weights = advantages[first : first + b].repeat_interleave(torch.tensor([len(e[0]) for e in chunk]))
        logp = policy(states).log_softmax(-1).gather(1, actions[:, None]).squeeze(1)
        (-(logp * weights).sum() / GLOBAL).backward()
    for p in policy.parameters() if WORLD > 1 else ():
        dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()
