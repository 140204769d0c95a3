"""Fault: policy and critic are wrapped in DDP, but the temperature (log_alpha) is a bare parameter with an optimizer of its own:
nothing reduces its gradient, and every process has another one."""
# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: not_reduced
# expect 2x4x2: not_reduced
# thorough
# blind 6

import contextlib
import os

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

OBS, ACT = 5, 2
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.mu, self.log_std = nn.Linear(OBS, 16), nn.Linear(16, ACT), nn.Linear(16, ACT)

    def forward(self, obs, eps):
        h = self.body(obs).tanh()
        mu, std = self.mu(h), self.log_std(h).clamp(-5, 2).exp()
        action = (mu + std * eps).tanh()
        logp = (-0.5 * eps**2 - std.log() - (1 - action**2 + 1e-6).log()).sum(-1)
        return action, logp


def replay(n):
    g = torch.Generator().manual_seed(8)

    def draw(d):
        return torch.randn(n, d, generator=g, dtype=torch.float64)

    return draw(OBS), draw(ACT).tanh(), draw(1).squeeze(1), draw(ACT)  # obs, action, return, the policy's noise


def wrap(module):
    return DDP(module) if world > 1 else module


def held_back(*modules):
    stack = contextlib.ExitStack()
    for m in modules if world > 1 else ():
        stack.enter_context(m.no_sync())
    return stack


torch.manual_seed(0)
b, k = flags()
if world > 1:
    dist.init_process_group("gloo")
pi_net, q_net = Policy().double(), nn.Sequential(nn.Linear(OBS + ACT, 16), nn.ReLU(), nn.Linear(16, 1)).double()
pi, q = wrap(pi_net), wrap(q_net)
log_alpha = nn.Parameter(torch.zeros((), dtype=torch.float64))
pi_opt = torch.optim.Adam(pi.parameters(), lr=3e-3)
q_opt = torch.optim.Adam(q.parameters(), lr=3e-3)
alpha_opt = torch.optim.SGD([log_alpha], lr=3e-2)
obs, act, ret, eps = (t[rank::world] for t in replay(80))
for i, mb in enumerate(torch.arange(len(obs)).split(b), 1):
    with held_back(pi, q) if i % k else contextlib.nullcontext():
        q_loss = (q(torch.cat([obs[mb], act[mb]], -1)).squeeze(-1) - ret[mb]).pow(2).mean()
        (q_loss / k).backward()
        action, logp = pi(obs[mb], eps[mb])
        q_net.requires_grad_(False)
        value = q_net(torch.cat([obs[mb], action], -1)).squeeze(-1)
        pi_loss = (log_alpha.exp().detach() * logp - value).mean()
        (pi_loss / k).backward()
        q_net.requires_grad_(True)
    alpha_loss = -(log_alpha * (logp.detach() - ACT)).mean()
    (alpha_loss / k).backward()
    if i % k == 0:
        for opt in (q_opt, pi_opt, alpha_opt):
            opt.step()
            opt.zero_grad()
