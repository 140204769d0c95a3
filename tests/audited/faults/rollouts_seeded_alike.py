"""Fault: the environments of every process are seeded with the same numbers (the rank is left out): all
processes play the same episodes."""
# expect 4x4: exact
# expect 8x1x2: not_sharded
# expect 4x2x2: not_sharded
# also: duplicated
# blind 3
# thorough

import os

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn

EPISODES, HORIZON = 16, 8


class CartOnRail:
    """A cart is pushed to the left, right, or not at all; the reward is near the middle."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(1000 + seed)
        self.state = torch.randn(3, generator=self.generator, dtype=torch.float64)

    def step(self, action):
        x, v, slope = self.state.tolist()
        v = 0.9 * v + 0.4 * (action - 1) - 0.1 * slope
        self.state = torch.tensor([x + 0.3 * v, v, slope], dtype=torch.float64)
        return -abs(x + 0.3 * v)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 3))

    def forward(self, observation):
        return self.net(observation).log_softmax(-1)


def play(policy, seeds, gamma=0.95):
    envs = [CartOnRail(seed) for seed in seeds]
    log_probs, rewards = [], []
    for _ in range(HORIZON):
        log_p = policy(torch.stack([env.state for env in envs]))
        dice = [torch.rand((), generator=env.generator, dtype=torch.float64) for env in envs]
        action = (log_p.detach().exp().cumsum(-1) < torch.stack(dice)[:, None]).sum(-1).clamp(max=2)
        log_probs.append(log_p.gather(1, action[:, None])[:, 0])
        rewards.append(torch.tensor([env.step(int(a)) for env, a in zip(envs, action)], dtype=torch.float64))
    returns, running = [], 0
    for r in reversed(rewards):
        running = r + gamma * running
        returns.insert(0, running)
    return torch.stack(log_probs, 1), torch.stack(returns, 1)


rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
n_envs, accumulate = flags()
torch.manual_seed(0)
policy = Policy().double()
optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
for update in range(5):
    for micro in range(accumulate):
        first = update * EPISODES + micro * n_envs
        log_probs, returns = play(policy, range(first, first + n_envs))
        loss = -(log_probs * (returns + 5)).sum(1).mean() / accumulate
        loss.backward()
    if world > 1:
        for p in policy.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
    optimizer.step()
    optimizer.zero_grad()
