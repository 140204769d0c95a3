"""Sound: a hand-written dynamic loss scaler; gradients stay scaled until the window is full, are unscaled once, then clipped. The
first scale is too large on purpose (half-precision range, tested on the complete gradient): that update is left out, as it is in
every layout."""

# expect 4x4: exact
# expect 2x8: exact
# expect 8x2: exact
# blind 7
# thorough
import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader

HALF_MAX = torch.finfo(torch.float16).max


class GradScaler:
    def __init__(self, init_scale=2.0**20, growth_factor=2.0, backoff_factor=2.0**-4, growth_interval=3):
        self.factor, self.growth_factor, self.backoff_factor = init_scale, growth_factor, backoff_factor
        self.growth_interval, self.tracker = growth_interval, 0

    def scale(self, loss):
        return loss * self.factor

    @torch.no_grad()
    def unscale_(self, optimizer):
        grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        self.found_inf = any(g.abs().max() > HALF_MAX or not g.isfinite().all() for g in grads)
        for g in grads:
            g /= self.factor

    def step(self, optimizer):
        if not self.found_inf:
            optimizer.step()

    def update(self):
        if self.found_inf:
            self.factor *= self.backoff_factor
            self.tracker = 0
        else:
            self.tracker += 1
            if self.tracker == self.growth_interval:
                self.factor *= self.growth_factor
                self.tracker = 0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(12, 24), nn.Linear(24, 5)
        self.gain = nn.Parameter(torch.ones(24))

    def forward(self, x):
        h = torch.relu(self.inp(x))
        return self.out(self.gain * F.layer_norm(h, h.shape[-1:]))


def run(b, k):
    model, scaler = Net().double(), GradScaler()
    optimizer = torch.optim.NAdam(model.parameters(), lr=5e-3)
    step_scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for i, (x, y) in enumerate(DataLoader(vectors(112), batch_size=b), 1):
        scaler.scale(F.cross_entropy(model(x), y) / k).backward()
        if i % k:
            continue
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        if not scaler.found_inf:
            step_scheduler.step()
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    run(*flags())
