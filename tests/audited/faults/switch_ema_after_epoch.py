"""Fault: the moving average, whose weights the model takes over after each epoch (switch EMA), is updated in every micro-batch,
not in every step: it follows the model too closely."""

# expect 4x4: average
# expect 2x8: average
# blind 7
# thorough
import copy

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader


class ModelEma:
    def __init__(self, model, decay):
        self.module, self.decay = copy.deepcopy(model).eval().requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.module.state_dict().values(), model.state_dict().values()):
            e.copy_(self.decay * e + (1 - self.decay) * p)


class Hook:
    def after_iter(self, runner): ...

    def after_epoch(self, runner): ...


class OptimizerHook(Hook):
    def __init__(self, cumulative_iters, max_norm):
        self.cumulative_iters, self.max_norm = cumulative_iters, max_norm

    def after_iter(self, runner):
        (runner.loss / self.cumulative_iters).backward()
        if (runner.iter + 1) % self.cumulative_iters == 0:
            nn.utils.clip_grad_norm_(runner.model.parameters(), self.max_norm)
            runner.optimizer.step()
            runner.optimizer.zero_grad()


class SwitchEMAHook(Hook):
    def __init__(self, model, decay=0.8):
        self.ema = ModelEma(model, decay)

    def after_iter(self, runner):
        self.ema.update(runner.model)

    def after_epoch(self, runner):
        runner.model.load_state_dict(self.ema.module.state_dict())


class EpochRunner:
    def __init__(self, model, optimizer, hooks):
        self.model, self.optimizer, self.hooks, self.iter = model, optimizer, hooks, 0

    def run(self, loader, epochs):
        for _ in range(epochs):
            for x, y in loader:
                self.loss = F.cross_entropy(self.model(x), y)
                for hook in self.hooks:
                    hook.after_iter(self)
                self.iter += 1
            for hook in self.hooks:
                hook.after_epoch(self)


if __name__ == "__main__":
    torch.manual_seed(0)
    b, k = flags()
    model = nn.Sequential(nn.Linear(12, 24), nn.SiLU(), nn.Linear(24, 5)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hooks = [OptimizerHook(k, max_norm=5.0), SwitchEMAHook(model)]
    EpochRunner(model, optimizer, hooks).run(DataLoader(vectors(48), batch_size=b), epochs=2)
