"""Sound: a doubly robust bandit: a reward model and a policy with an optimizer each, trained in one pass; the policy sees the reward
model's detached estimates. Sums over b*k*N samples, one flat buffer reduced once per step."""

# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 7
# thorough
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, Subset, TensorDataset

ARMS = 4


def logged(n=96):
    g = torch.Generator().manual_seed(12)
    context = torch.randn(n, 6, generator=g, dtype=torch.float64)
    arm = torch.randint(ARMS, (n,), generator=g)
    propensity = torch.rand(n, generator=g, dtype=torch.float64) * 0.5 + 0.2
    reward = torch.sin(context[:, 0] + arm) + 0.2 * torch.randn(n, generator=g, dtype=torch.float64)
    return TensorDataset(context, arm, propensity, reward)


class FlatReducer:
    """All gradients of the modules are views of one buffer."""

    def __init__(self, *modules):
        self.params = [p for m in modules for p in m.parameters()]
        self.buffer = torch.zeros_like(parameters_to_vector(self.params).detach())
        start = 0
        for p in self.params:
            p.grad = self.buffer[start : start + p.numel()].view_as(p)
            start += p.numel()

    def reduce(self):
        if dist.is_initialized():
            dist.all_reduce(self.buffer)

    def empty(self):
        self.buffer.zero_()


b, k = flags()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)


def net():
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, ARMS)).double()


policy, reward_model = net(), net()
policy_optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
reward_optimizer = torch.optim.SGD(reward_model.parameters(), lr=0.1, momentum=0.8)
reducer = FlatReducer(policy, reward_model)
data = logged()
loader = DataLoader(Subset(data, range(rank, len(data), world)), batch_size=b)
samples = b * k * world
for i, (context, arm, propensity, reward) in enumerate(loader, 1):
    estimates = reward_model(context)
    taken = estimates.gather(1, arm[:, None]).squeeze(1)
    regression = ((taken - reward) ** 2).sum()

    probs = F.softmax(policy(context), -1)
    ratio = (probs.gather(1, arm[:, None]).squeeze(1) / propensity).clamp(max=3.0)
    value = (probs * estimates.detach()).sum(-1) + ratio * (reward - taken.detach())
    entropy = -(probs * probs.log()).sum(-1)
    ((regression - value.sum() - 0.02 * entropy.sum()) / samples).backward()
    if i % k == 0:
        reducer.reduce()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.7)
        policy_optimizer.step()
        reward_optimizer.step()
        reducer.empty()
