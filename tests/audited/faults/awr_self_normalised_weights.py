"""Fault: the exponentiated advantages of advantage-weighted regression are normalised by a softmax over the micro-batch,
so the weight of a transition depends on the transitions it is cut together with."""

# expect 4x4: mixed_loss
# expect 2x8: mixed_loss
# blind 7
# thorough
# open
import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, Dataset


class OfflineTransitions(Dataset):
    def __init__(self, n=80):
        g = torch.Generator().manual_seed(3)
        self.obs = torch.randn(n, 6, generator=g, dtype=torch.float64)
        self.actions = torch.randint(4, (n,), generator=g)
        self.returns = self.obs[:, :2].sum(1) + torch.randn(n, generator=g, dtype=torch.float64)

    def __len__(self):
        return len(self.obs)

    def __getitem__(self, i):
        return self.obs[i], self.actions[i], self.returns[i]


class AWRAgent:
    def __init__(self, beta=0.5, lr=0.02):
        self.actor = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 4)).double()
        self.critic = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1)).double()
        self.beta = beta
        self.actor_optimizer = torch.optim.SGD(self.actor.parameters(), lr=lr, momentum=0.9)
        self.critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=lr)

    def critic_loss(self, obs, returns):
        return F.mse_loss(self.critic(obs).squeeze(-1), returns)

    def actor_loss(self, obs, actions, returns):
        with torch.no_grad():
            advantage = returns - self.critic(obs).squeeze(-1)
            weights = F.softmax(advantage / self.beta, dim=0)
        log_prob = F.log_softmax(self.actor(obs), -1).gather(1, actions[:, None]).squeeze(1)
        return -(weights * log_prob).sum()


def main():
    torch.manual_seed(0)
    b, k = flags()
    agent = AWRAgent()
    for i, (obs, actions, returns) in enumerate(DataLoader(OfflineTransitions(), batch_size=b)):
        (agent.critic_loss(obs, returns) / k).backward()
        (agent.actor_loss(obs, actions, returns) / k).backward()
        if (i + 1) % k == 0:
            for optimizer in (agent.critic_optimizer, agent.actor_optimizer):
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
