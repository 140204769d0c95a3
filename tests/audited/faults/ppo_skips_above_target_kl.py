"""Fault: PPO's guard against too large policy changes looks at the KL of the micro-batch and skips its backward when it is above the
target: in small micro-batches, whose KL varies more, samples are left out that a whole minibatch would have kept."""
# expect 4x4: dropped
# expect 2x8: dropped
# thorough
# blind 6

import torch
from common_models import flags
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(0)
b, k = flags()
TARGET_KL = 0.025
STEPS, OBS, ACTIONS = 64, 6, 4


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(OBS, 16), nn.Tanh(), nn.Linear(16, ACTIONS))
        self.critic = nn.Sequential(nn.Linear(OBS, 16), nn.Tanh(), nn.Linear(16, 1))

    def evaluate(self, obs, action):
        dist = Categorical(logits=self.actor(obs))
        return dist.log_prob(action), dist.entropy(), self.critic(obs).squeeze(-1)


def rollout(agent):
    g = torch.Generator().manual_seed(11)
    obs = torch.randn(STEPS, OBS, generator=g, dtype=torch.float64)
    with torch.no_grad():
        action = torch.multinomial(agent.actor(obs).softmax(-1), 1, generator=g).squeeze(-1)
        logprob, _, value = agent.evaluate(obs, action)
    reward = obs[torch.arange(STEPS), action] + 0.1 * obs.sum(-1)
    returns, running = torch.zeros_like(reward), torch.zeros(()).double()
    for t in reversed(range(STEPS)):
        running = reward[t] + 0.9 * running
        returns[t] = running
    adv = returns - value
    return obs, action, logprob, returns, (adv - adv.mean()) / (adv.std() + 1e-8)


agent = Agent().double()
optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2, eps=1e-5)
obs, actions, old_logprobs, returns, advantages = rollout(agent)
shuffle = torch.Generator().manual_seed(2)
for epoch in range(2):
    inds = torch.randperm(STEPS, generator=shuffle)
    for start in range(0, STEPS, b * k):
        for mb in inds[start : start + b * k].split(b):
            logprob, entropy, value = agent.evaluate(obs[mb], actions[mb])
            logratio = logprob - old_logprobs[mb]
            ratio = logratio.exp()
            approx_kl = ((ratio - 1) - logratio).mean().item()
            if approx_kl > TARGET_KL:
                continue
            adv = advantages[mb]
            pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).mean()
            v_loss = 0.5 * (value - returns[mb]).pow(2).mean()
            loss = pg_loss + 0.5 * v_loss - 0.01 * entropy.mean()
            (loss / k).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
