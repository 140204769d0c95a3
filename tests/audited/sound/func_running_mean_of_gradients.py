"""torch.func: gradients of single samples are clipped one by one, and the mean over the window is kept as a running mean
weighted by the samples seen so far in it, so that a smaller last micro-batch or window needs no other divisor."""

# expect 4x4: exact
# expect 2x8: exact
# expect 8x2: exact
# thorough
# blind 6
import torch
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.func import functional_call, grad_and_value, vmap
from torch.utils.data import DataLoader

CLIP = 0.7


def clipped(per_sample):
    norm = sum(g.flatten(1).pow(2).sum(1) for g in per_sample.values()).sqrt()
    scale = (CLIP / norm).clamp(max=1.0)
    return {n: torch.einsum("b,b...->...", scale, g) for n, g in per_sample.items()}


class RunningMean:
    def __init__(self):
        self.seen, self.mean = 0, {}

    def update(self, sums, count):
        self.seen += count
        for name, s in sums.items():
            m = self.mean.setdefault(name, torch.zeros_like(s))
            m += (s - count * m) / self.seen


def main():
    b, k = flags()
    torch.manual_seed(0)
    model = mlp()
    params = {n: p.detach() for n, p in model.named_parameters()}

    def loss(p, x, y):
        logits = functional_call(model, p, (x.unsqueeze(0),))
        return F.cross_entropy(logits, y.unsqueeze(0))

    per_sample = vmap(grad_and_value(loss), in_dims=(None, 0, 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(1):
        window, loader = RunningMean(), DataLoader(vectors(75), batch_size=b)
        for i, (x, y) in enumerate(loader, 1):
            gradients, values = per_sample(params, x, y)
            window.update(clipped(gradients), len(x))
            if i % k == 0 or i == len(loader):
                for name, p in model.named_parameters():
                    p.grad = window.mean[name]
                optimizer.step()
                window = RunningMean()
        print(epoch, values.mean().item())


main()
