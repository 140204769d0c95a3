"""Sound: bootstrapped double DQN: a transition trains the heads of its mask, the loss of a head is over the transitions of the window
that it sees, importance weights are scaled by the largest of the window, the target is copied every second update."""

# expect 4x4: exact
# expect 2x8: exact
# expect 1x16: exact
# blind 7
# thorough
import copy

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn

HEADS, ACTIONS = 4, 3


class BootstrappedQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.core = nn.Sequential(nn.Linear(6, 32), nn.ReLU())
        self.heads = nn.Linear(32, HEADS * ACTIONS)

    def forward(self, obs):
        return self.heads(self.core(obs)).unflatten(-1, (HEADS, ACTIONS))


class Replay:
    def __init__(self, n=200):
        g = torch.Generator().manual_seed(6)
        self.g = g
        self.obs, self.next_obs = torch.randn(2, n, 6, generator=g, dtype=torch.float64)
        self.action = torch.randint(ACTIONS, (n,), generator=g)
        self.reward = self.obs[:, 0] + self.action * self.obs[:, 1]
        self.done = (torch.rand(n, generator=g) < 0.1).double()
        self.mask = (torch.rand(n, HEADS, generator=g) < 0.5).double()
        self.priority = torch.rand(n, generator=g, dtype=torch.float64) + 0.05

    def sample(self, size):
        p = self.priority / self.priority.sum()
        rows = torch.multinomial(p, size, generator=self.g)
        weight = (len(p) * p[rows]) ** -0.5
        return rows, weight / weight.max()


def td_errors(online, target, replay, rows, gamma=0.95):
    pick = replay.action[rows][:, None, None].expand(-1, HEADS, 1)
    q = online(replay.obs[rows]).gather(2, pick).squeeze(2)
    with torch.no_grad():
        greedy = online(replay.next_obs[rows]).argmax(2, keepdim=True)
        following = target(replay.next_obs[rows]).gather(2, greedy).squeeze(2)
        goal = replay.reward[rows, None] + gamma * (1 - replay.done[rows, None]) * following
    return q, goal


def main(updates=7, target_period=2):
    torch.manual_seed(0)
    b, k = flags()
    online, replay = BootstrappedQ().double(), Replay()
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.RMSprop(online.parameters(), lr=3e-3, centered=True)
    for update in range(1, updates + 1):
        rows, weight = replay.sample(b * k)
        seen = replay.mask[rows].sum(0).clamp(min=1)  # per head, in the whole window
        errors = []
        for part, w in zip(rows.split(b), weight.split(b)):
            q, goal = td_errors(online, target, replay, part)
            loss = F.smooth_l1_loss(q, goal, reduction="none") * replay.mask[part] * w[:, None]
            (loss / seen).sum().div(HEADS).backward()
            errors.append((q - goal).detach().abs().mean(1))
        online.core[0].weight.grad /= HEADS**0.5  # the heads' gradients meet in the core
        optimizer.step()
        optimizer.zero_grad()
        replay.priority[rows] = torch.cat(errors) + 0.05
        if update % target_period == 0:
            target.load_state_dict(online.state_dict())


if __name__ == "__main__":
    main()
