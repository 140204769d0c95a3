"""Sound: PPO over shuffled minibatches, each cut into micro-batches; advantages are standardised over the minibatch before the
cut, and the early stop looks at the KL of the whole minibatch, before its step."""

# expect 4x4: exact
# expect 2x8: exact
# expect 1x16: exact
# blind 7
# thorough
import torch
from common_models import flags
from torch import nn
from torch.distributions import Normal


class GaussianAgent(nn.Module):
    def __init__(self, obs=6, act=2):
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(obs, 24), nn.Tanh(), nn.Linear(24, act))
        self.value = nn.Sequential(nn.Linear(obs, 24), nn.Tanh(), nn.Linear(24, 1))
        self.log_std = nn.Parameter(torch.zeros(act))

    def forward(self, obs):
        return Normal(self.mean(obs), self.log_std.exp()), self.value(obs).squeeze(-1)


class PPO:
    def __init__(self, agent, micro_batch, accumulate, target_kl=0.03, epochs=3):
        self.agent, self.micro_batch, self.accumulate = agent, micro_batch, accumulate
        self.target_kl, self.epochs = target_kl, epochs
        self.optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2, eps=1e-5)

    def terms(self, obs, act, old_log_prob, advantage, returns, old_value):
        dist, value = self.agent(obs)
        log_ratio = dist.log_prob(act).sum(-1) - old_log_prob
        ratio = log_ratio.exp()
        policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        clipped = old_value + (value - old_value).clamp(-0.2, 0.2)
        critic = torch.max((value - returns) ** 2, (clipped - returns) ** 2) / 2
        loss = policy + 0.5 * critic - 0.003 * dist.entropy().sum(-1)
        return loss.sum(), ((ratio - 1) - log_ratio).detach().sum()

    def minibatch(self, columns):
        size = len(columns[0])
        columns[3] = (columns[3] - columns[3].mean()) / (columns[3].std() + 1e-8)
        self.optimizer.zero_grad()
        kl = 0.0
        for part in zip(*(c.split(self.micro_batch) for c in columns)):
            loss, part_kl = self.terms(*part)
            (loss / size).backward()
            kl += part_kl.item() / size
        if kl > self.target_kl:
            return False
        nn.utils.clip_grad_norm_(self.agent.parameters(), 0.5)
        self.optimizer.step()
        return True

    def update(self, rollout):
        size = self.micro_batch * self.accumulate
        for _ in range(self.epochs):
            for rows in torch.randperm(len(rollout[0])).split(size):
                if not self.minibatch([c[rows] for c in rollout]):
                    return


torch.manual_seed(0)
agent = GaussianAgent().double()
obs = torch.randn(48, 6, dtype=torch.float64)
with torch.no_grad():
    dist, value = agent(obs)
    act = dist.sample()
    returns = (obs[:, :2] * act).sum(-1) + 0.1 * torch.randn(48, dtype=torch.float64)
rollout = [obs, act, dist.log_prob(act).sum(-1), returns - value, returns, value]
PPO(agent, *flags()).update(rollout)
