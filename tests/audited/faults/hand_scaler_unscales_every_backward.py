"""Fault: the hand-written loss scaler unscales the gradients after every backward, so what earlier micro-batches left there is
divided by the scale again and again: nearly only the last micro-batch counts."""

# expect 4x4: changed_between
# expect 8x2: changed_between
# expect 1x16: changed_between
# blind 7
# thorough
import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader


class DynamicLossScaler:
    def __init__(self, init_scale=2.0**8, growth_interval=4):
        self.scale, self.growth_interval, self.good_steps = init_scale, growth_interval, 0

    def backward(self, loss):
        (loss * self.scale).backward()

    def unscale_(self, optimizer):
        finite = True
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(self.scale)
                    finite = finite and bool(torch.isfinite(p.grad).all())
        return finite

    def update(self, finite):
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good_steps % self.growth_interval == 0:
            self.scale *= 2


class NativeScalerTrainer:
    def __init__(self, model, optimizer, scaler, update_freq, clip_grad):
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.update_freq, self.clip_grad = update_freq, clip_grad

    def train_one_epoch(self, loader):
        finite = True
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(self.model(x), y, label_smoothing=0.1) / self.update_freq
            self.scaler.backward(loss)
            finite = self.scaler.unscale_(self.optimizer) and finite
            if (i + 1) % self.update_freq == 0:
                if finite:
                    nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad)
                    self.optimizer.step()
                self.scaler.update(finite)
                self.optimizer.zero_grad()
                finite = True


if __name__ == "__main__":
    torch.manual_seed(0)
    b, k = flags()
    model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 5)).double()
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    trainer = NativeScalerTrainer(model, optimizer, DynamicLossScaler(), k, clip_grad=1.0)
    trainer.train_one_epoch(DataLoader(vectors(112), batch_size=b))
