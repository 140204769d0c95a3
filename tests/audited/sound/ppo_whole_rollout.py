"""Sound: PPO: 16 environments are rolled out together and advantages are normalized over all of them, before
they are cut into micro-batches."""
# expect 4x4: exact
# expect 2x8: exact
# blind 1
# thorough

import torch
from common_models import flags
from torch import nn
from torch.distributions import Categorical

b, k = flags()
torch.manual_seed(0)
ENVS, STEPS, GAMMA, LAMBDA, CLIP = 16, 8, 0.95, 0.9, 0.2


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 24), nn.Tanh())
        self.actor, self.critic = nn.Linear(24, 3), nn.Linear(24, 1)

    def forward(self, obs):
        hidden = self.body(obs)
        return Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(-1)


def environment_step(obs, action):
    push = torch.stack([action - 1.0, 1.0 - action, 0 * action, 0.5 * (action == 1)], -1)
    obs = 0.9 * obs + 0.3 * push
    return obs, 1.0 - obs.pow(2).mean(-1)


@torch.no_grad()
def rollout(model, obs):
    rows = []
    for _ in range(STEPS):
        policy, value = model(obs)
        action = policy.sample()
        after, reward = environment_step(obs, action)
        rows.append((obs, action, policy.log_prob(action), value, reward))
        obs = after
    observations, actions, logps, values, rewards = (torch.stack(column, dim=1) for column in zip(*rows))
    following, running, advantages = model(obs)[1], torch.zeros(ENVS), torch.zeros_like(values)
    for t in reversed(range(STEPS)):
        delta = rewards[:, t] + GAMMA * following - values[:, t]
        running = delta + GAMMA * LAMBDA * running
        advantages[:, t], following = running, values[:, t]
    returns = advantages + values
    return observations, actions, logps, (advantages - advantages.mean()) / (advantages.std() + 1e-8), returns, obs


model = ActorCritic().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
obs = torch.randn(ENVS, 4, dtype=torch.float64)
for iteration in range(3):
    *batch, obs = rollout(model, obs)
    for epoch in range(2):
        for rows in torch.arange(ENVS).split(b):
            o, a, old_logp, advantage, ret = (t[rows] for t in batch)
            policy, value = model(o)
            ratio = (policy.log_prob(a) - old_logp).exp()
            surrogate = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
            loss = -surrogate + 0.5 * (value - ret).pow(2).mean() - 0.01 * policy.entropy().mean()
            (loss / k).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
