"""Fault: batch norms are frozen by a callback before the fit, but the validation after each epoch ends with model.train(), so that from the second epoch on they take the statistics of micro-batches."""
# expect 4x4: batch_norm
# expect 2x8: batch_norm
# also: mixed_samples
# blind 5
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, images
from torch import nn
from torch.utils.data import DataLoader

b, k = flags()


class Callback:
    def before_fit(self, learn): ...
    def after_batch(self, learn): ...
    def after_epoch(self, learn): ...


class BnFreeze(Callback):
    def before_fit(self, learn):
        for m in learn.model.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.eval()


class Recorder(Callback):
    def after_batch(self, learn):
        learn.losses.append(float(learn.loss))


class Learner:
    def __init__(self, train, valid, model, loss_func, opt, cbs, n_acc):
        self.train, self.valid, self.model, self.loss_func, self.opt = train, valid, model, loss_func, opt
        self.cbs, self.n_acc, self.losses = cbs, n_acc, []

    def __call__(self, name):
        for cb in self.cbs:
            getattr(cb, name)(self)

    def validate(self):
        self.model.eval()
        with torch.no_grad():
            self.metric = sum(float((self.model(x).argmax(1) == y).sum()) for x, y in self.valid)
        self.model.train()

    def fit(self, epochs):
        self.model.train()
        self("before_fit")
        for _ in range(epochs):
            for i, (x, y) in enumerate(self.train, 1):
                self.loss = self.loss_func(self.model(x), y)
                (self.loss / self.n_acc).backward()
                if i % self.n_acc == 0:
                    self.opt.step()
                    self.opt.zero_grad()
                self("after_batch")
            self.validate()
            self("after_epoch")


torch.manual_seed(0)
body = nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
model = nn.Sequential(body, nn.Flatten(), nn.Linear(32, 5)).double()
for m in model.modules():  # "pretrained"
    if isinstance(m, nn.BatchNorm2d):
        m.running_mean.normal_(0, 0.2)
        m.running_var.uniform_(0.4, 1.0)
data = images(80)
loaders = DataLoader(data, batch_size=b), DataLoader(data[:20], batch_size=20)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
Learner(*loaders, model, F.cross_entropy, opt, [BnFreeze(), Recorder()], k).fit(2)
