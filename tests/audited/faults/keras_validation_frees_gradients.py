"""Fault: a callback validates every 6 batches and frees the gradients for the memory; where this falls into a window, its first micro-batches are lost."""
# expect 4x4: emptied_between
# expect 2x8: emptied_between
# also: dropped
# blind 5
# thorough

import torch
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader


class Callback:
    model = None

    def on_train_batch_end(self, batch, logs): ...


class History(Callback):
    def __init__(self):
        self.loss = []

    def on_train_batch_end(self, batch, logs):
        self.loss.append(logs["loss"])


class ValidateEvery(Callback):
    def __init__(self, data, batches):
        self.data, self.batches = data, batches

    def on_train_batch_end(self, batch, logs):
        if (batch + 1) % self.batches:
            return
        self.model.network.zero_grad(set_to_none=True)  # room for the large validation batch
        self.model.network.eval()
        with torch.inference_mode():
            x, y = self.data
            logs["val_accuracy"] = float((self.model.network(x).argmax(1) == y).double().mean())
        self.model.network.train()


class Model:
    def __init__(self, network):
        self.network = network

    def compile(self, optimizer, loss, gradient_accumulation_steps):
        self.optimizer, self.loss, self.accumulation = optimizer, loss, gradient_accumulation_steps

    def train_step(self, batch, x, y):
        loss = self.loss(self.network(x), y)
        (loss / self.accumulation).backward()
        if (batch + 1) % self.accumulation == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"loss": float(loss)}

    def fit(self, loader, epochs, callbacks):
        for callback in callbacks:
            callback.model = self
        for _ in range(epochs):
            for batch, (x, y) in enumerate(loader):
                logs = self.train_step(batch, x, y)
                for callback in callbacks:
                    callback.on_train_batch_end(batch, logs)


b, k = flags()
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(12, 24), nn.Mish(), nn.Linear(24, 24), nn.Mish(), nn.Linear(24, 5)).double()
model = Model(network)
model.compile(torch.optim.NAdam(network.parameters(), lr=5e-3), nn.CrossEntropyLoss(), k)
xs, ys = zip(*vectors(112)[80:])
validation = torch.stack(xs), torch.stack(ys)
model.fit(DataLoader(vectors(112)[:80], batch_size=b), 2, [History(), ValidateEvery(validation, 6)])
