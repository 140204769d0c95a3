"""Fault: the policy keeps its log-probabilities in a list that is only emptied after the optimizer step, and the loss is the sum
over the list: the episodes of earlier micro-batches are computed backward again with each later one."""

# expect 4x4: counted_again
# expect 2x8: counted_again
# blind 7
# thorough
# open
import torch
from common_models import flags
from torch import nn
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1, self.affine2 = nn.Linear(5, 32), nn.Linear(32, 3)
        self.saved_log_probs, self.rewards = [], []

    def forward(self, x):
        return self.affine2(torch.tanh(self.affine1(x)))


class Corridor:
    """Ten moves on a line; the wind of an episode comes from its seed."""

    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.wind = torch.randn(2, generator=self.g, dtype=torch.float64)
        self.x, self.t = torch.zeros((), dtype=torch.float64), 0

    def observe(self):
        now = torch.stack([self.x, self.x.sin(), torch.tensor(self.t / 10, dtype=torch.float64)])
        return torch.cat([now, self.wind])

    def act(self, logits):
        action = torch.multinomial(logits.softmax(-1).detach(), 1, generator=self.g)[0]
        self.x = self.x + (action - 1) * 0.5 + 0.1 * self.wind[0]
        self.t += 1
        return action, -(self.x - self.wind[1]).abs()


def run_episode(policy, seed, gamma=0.95, moves=10):
    env, log_probs, rewards = Corridor(seed), [], []
    for _ in range(moves):
        logits = policy(env.observe())
        action, reward = env.act(logits)
        log_probs.append(Categorical(logits=logits).log_prob(action))
        rewards.append(reward)
    returns, running = [], 0.0
    for r in reversed(rewards):
        running = r + gamma * running
        returns.insert(0, running)
    policy.saved_log_probs.append(torch.stack(log_probs))
    policy.rewards.append(torch.stack(returns) + 5.0)


def finish_batch(policy, episodes_per_step):
    terms = [-(lp * r).mean() for lp, r in zip(policy.saved_log_probs, policy.rewards)]
    loss = torch.stack(terms).sum() / episodes_per_step
    loss.backward(retain_graph=True)


if __name__ == "__main__":
    torch.manual_seed(543)
    b, k = flags()
    policy = Policy().double()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    episode = 0
    for step in range(4):
        for _ in range(k):
            for _ in range(b):
                run_episode(policy, seed=episode)
                episode += 1
            finish_batch(policy, b * k)
        optimizer.step()
        optimizer.zero_grad()
        del policy.saved_log_probs[:], policy.rewards[:]
