"""Fault: the gradient of every micro-batch is divided by the root of that micro-batch's diagonal Fisher matrix before it
is added up, instead of the gradient of the step by the Fisher matrix of the step."""

# expect 4x4: changed_between
# expect 2x8: changed_between
# also: not_a_sum
# thorough
# blind 6
import torch
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader

DAMPING = 1e-2


def build():
    torch.manual_seed(0)
    model = mlp()
    params = dict(model.named_parameters())

    def sample_loss(p, x, y):
        return F.cross_entropy(functional_call(model, p, (x[None],)), y[None])

    return model, params, vmap(grad(sample_loss), in_dims=(None, 0, 0))


def natural(per_sample):
    """Gradient over the root of the diagonal of the empirical Fisher matrix."""
    out = {}
    for name, g in per_sample.items():
        fisher = g.pow(2).mean(0)
        out[name] = g.mean(0) / (fisher.sqrt() + DAMPING)
    return out


def main():
    b, k = flags()
    model, params, per_sample_gradients = build()
    optimizer = torch.optim.SGD(params.values(), lr=0.01)
    optimizer.zero_grad()
    for i, (x, y) in enumerate(DataLoader(vectors(80), batch_size=b), 1):
        detached = {n: p.detach() for n, p in params.items()}
        direction = natural(per_sample_gradients(detached, x, y))
        for name, p in params.items():
            step = direction[name] / k
            p.grad = step if p.grad is None else p.grad + step
        if i % k == 0:
            optimizer.step()
            optimizer.zero_grad()


main()
