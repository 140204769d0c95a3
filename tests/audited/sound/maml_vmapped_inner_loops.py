"""Sound: second-order MAML with torch.func: the inner loops of the tasks of a micro-batch run in one vmap, every task on
weights of its own; a sample is a task, and the meta loss is the mean over the tasks of the step."""

# expect 4x4: exact
# expect 8x2: exact
# expect 2x8: exact
# blind 7
# thorough
import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
b, k = flags()
WAYS, SHOTS, QUERIES, DIM = 3, 2, 4, 6


def few_shot_tasks(n=64):
    g = torch.Generator().manual_seed(1)
    means = torch.randn(n, WAYS, 1, DIM, generator=g, dtype=torch.float64)
    x = means + 0.5 * torch.randn(n, WAYS, SHOTS + QUERIES, DIM, generator=g, dtype=torch.float64)
    return TensorDataset(x[:, :, :SHOTS].flatten(1, 2), x[:, :, SHOTS:].flatten(1, 2))


support_y = torch.arange(WAYS).repeat_interleave(SHOTS)
query_y = torch.arange(WAYS).repeat_interleave(QUERIES)


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(DIM, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, WAYS))
        # Meta-SGD: a learned rate for every tensor
        self.rates = nn.ParameterList(nn.Parameter(torch.full((), 0.4)) for _ in self.net.parameters())


learner = Learner().double()
names = [n for n, _ in learner.net.named_parameters()]


def inner_loss(weights, x, y):
    return F.cross_entropy(functional_call(learner.net, weights, (x,)), y)


def meta_loss(xs, xq, weights, rates, inner_steps=2):
    for _ in range(inner_steps):
        grads = grad(inner_loss)(weights, xs, support_y)
        weights = {n: w - rates[n] * grads[n] for n, w in weights.items()}
    return inner_loss(weights, xq, query_y)


meta_optimizer = torch.optim.Adam(learner.parameters(), lr=5e-3)
for i, (xs, xq) in enumerate(DataLoader(few_shot_tasks(), batch_size=b)):
    weights = dict(learner.net.named_parameters())
    rates = dict(zip(names, learner.rates))
    losses = vmap(meta_loss, in_dims=(0, 0, None, None))(xs, xq, weights, rates)
    (losses.mean() / k).backward()
    if (i + 1) % k == 0:
        meta_optimizer.step()
        meta_optimizer.zero_grad()
