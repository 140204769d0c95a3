"""Fault: every process clips its own gradient, and only then are the gradients averaged by hand."""
# expect 4x4: exact
# expect 4x2x2: changed_between
# expect 8x1x2: changed_between
# blind 1
# thorough

import os

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.distributions import Categorical

b, k = flags()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(10)


def average_gradients(module):
    if world == 1:
        return
    for p in module.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world


def rewards_to_go(rewards, gamma=0.9):
    out = torch.zeros_like(rewards)
    running = torch.zeros(len(rewards), dtype=rewards.dtype)
    for t in reversed(range(rewards.size(1))):
        running = rewards[:, t] + gamma * running
        out[:, t] = running
    return out


g = torch.Generator().manual_seed(4)
observations = torch.randn(80, 7, 5, generator=g, dtype=torch.float64)
actions = torch.randint(4, (80, 7), generator=g)
returns = rewards_to_go(torch.randn(80, 7, generator=g, dtype=torch.float64) + observations[..., 0])

actor = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 4)).double()
critic = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 1)).double()
agent = nn.ModuleList([actor, critic])
optimizer = torch.optim.SGD(agent.parameters(), lr=0.5)

micro_step = 0
for start in range(rank * b, 80, world * b):
    obs, act, ret = (t[start : start + b] for t in (observations, actions, returns))
    value = critic(obs).squeeze(-1)
    advantage = (ret - value).detach()
    policy_loss = -(Categorical(logits=actor(obs)).log_prob(act) * advantage).mean()
    loss = policy_loss + 0.5 * (ret - value).pow(2).mean()
    (loss / k).backward()
    micro_step += 1
    if micro_step % k == 0:
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        average_gradients(agent)
        optimizer.step()
        optimizer.zero_grad()

if world > 1:
    dist.destroy_process_group()
