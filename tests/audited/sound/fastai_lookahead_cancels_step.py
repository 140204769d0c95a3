"""Sound: a GradientAccumulation callback counts samples and cancels the step until there are 16; Lookahead's slow weights follow every second real step, and gradients are emptied only after one."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x2: exact
# blind 5
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, images
from torch import nn
from torch.utils.data import DataLoader


class CancelStepException(Exception): ...


class Lookahead:
    def __init__(self, opt, k=2, alpha=0.5):
        self.opt, self.k, self.alpha, self.count = opt, k, alpha, 0
        self.params = [p for group in opt.param_groups for p in group["params"]]
        self.slow = [p.detach().clone() for p in self.params]

    @torch.no_grad()
    def step(self):
        self.opt.step()
        self.count += 1
        if self.count % self.k == 0:
            for slow, p in zip(self.slow, self.params):
                p.copy_(slow.lerp_(p, self.alpha))

    def zero_grad(self):
        self.opt.zero_grad()


class GradientAccumulation:
    def __init__(self, n_acc):
        self.n_acc, self.count = n_acc, 0

    def before_backward(self, learn):
        self.count += len(learn.yb)
        learn.loss_grad = learn.loss * len(learn.yb) / self.n_acc

    def before_step(self, learn):
        if self.count < self.n_acc and not learn.is_last:
            raise CancelStepException
        self.count = 0


class Learner:
    def __init__(self, dl, model, opt, cb):
        self.dl, self.model, self.opt, self.cb = dl, model, opt, cb

    def one_batch(self):
        self.loss = F.cross_entropy(self.model(self.xb), self.yb)
        self.cb.before_backward(self)
        self.loss_grad.backward()
        try:
            self.cb.before_step(self)
            self.opt.step()
            self.opt.zero_grad()
        except CancelStepException:
            pass

    def fit(self, epochs):
        for _ in range(epochs):
            for i, batch in enumerate(self.dl, 1):
                self.xb, self.yb = batch
                self.is_last = i == len(self.dl)
                self.one_batch()


b, k = flags()
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(2, 10, 3), nn.Mish(), nn.Conv2d(10, 10, 3), nn.Mish(), nn.Flatten(), nn.Linear(40, 5)
).double()
opt = Lookahead(torch.optim.RAdam(model.parameters(), lr=1e-2, betas=(0.95, 0.99), eps=1e-5))
Learner(DataLoader(images(77), batch_size=b), model, opt, GradientAccumulation(b * k)).fit(2)
