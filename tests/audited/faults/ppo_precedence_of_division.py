"""Fault: the accumulation divides only the last term of the PPO loss (a slip of precedence): the policy and its entropy bonus
are k times too strong against the value function."""

# expect 4x4: factor
# expect 2x8: factor
# expect 1x16: factor
# blind 7
# thorough
import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, TensorDataset


class ActorCritic(nn.Module):
    def __init__(self, obs=8, actions=3, hidden=24):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(obs, hidden), nn.Tanh(), nn.Linear(hidden, actions))
        self.critic = nn.Sequential(nn.Linear(obs, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def evaluate(self, obs, actions):
        dist = Categorical(logits=self.actor(obs))
        return dist.log_prob(actions), dist.entropy(), self.critic(obs).squeeze(-1)


def collect(agent, steps=48, gamma=0.97, lam=0.9):
    """A rollout in a linear toy environment; generalised advantages, standardised over the whole rollout."""
    drift = torch.randn(3, 8, dtype=torch.float64)
    state, rows, rewards, values = torch.zeros(8, dtype=torch.float64), [], [], []
    with torch.no_grad():
        for _ in range(steps):
            dist = Categorical(logits=agent.actor(state))
            action = dist.sample()
            rows.append((state, action, dist.log_prob(action)))
            values.append(agent.critic(state).squeeze())
            state = torch.tanh(0.8 * state + 0.4 * drift[action] + 0.1 * torch.randn(8, dtype=torch.float64))
            rewards.append(state[0] - state[1].abs())
        values.append(agent.critic(state).squeeze())
        advantages, running = torch.zeros(steps, dtype=torch.float64), 0.0
        for t in reversed(range(steps)):
            running = rewards[t] + gamma * values[t + 1] - values[t] + gamma * lam * running
            advantages[t] = running
        returns = advantages + torch.stack(values[:-1])
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    obs, actions, log_probs = (torch.stack(c) for c in zip(*rows))
    return TensorDataset(obs, actions, log_probs, advantages, returns)


torch.manual_seed(5)
b, k = flags()
agent = ActorCritic().double()
optimizer = torch.optim.SGD(agent.parameters(), lr=0.05, momentum=0.9)
rollout = collect(agent)
micro = 0
for epoch in range(2):
    for obs, actions, old_log_probs, advantages, returns in DataLoader(rollout, batch_size=b):
        log_probs, entropy, values = agent.evaluate(obs, actions)
        ratio = (log_probs - old_log_probs).exp()
        policy_loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        value_loss = F.mse_loss(values, returns)
        loss = policy_loss - 0.01 * entropy.mean() + 0.5 * value_loss / k
        loss.backward()
        micro += 1
        if micro % k == 0:
            optimizer.step()
            optimizer.zero_grad()
