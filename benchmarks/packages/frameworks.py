"""Training loops of libraries as they document them, each with its own gradient accumulation: a mean over 77 samples.

skorch has none: its loop is a subclass whose train_step accumulates, of our own, in the style of what people write.
"""

import os
import sys

import torch
import torch.nn.functional as F
from setup import NUM_SAMPLES, RATE, arguments
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

mode = sys.argv.pop(1)  # ignite, fastai, accelerated, torchtnt or skorch
flags = arguments()
b, k = flags["per_device_train_batch_size"], flags["gradient_accumulation_steps"]
inputs, classes = torch.randn(NUM_SAMPLES, 12), torch.randint(5, (NUM_SAMPLES,))
data = TensorDataset(inputs, classes)
model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 5))


def make_optimizer(parameters=None):
    return torch.optim.SGD(parameters or model.parameters(), lr=RATE)


if mode == "ignite":
    from ignite.engine import create_supervised_trainer

    trainer = create_supervised_trainer(model, make_optimizer(), F.cross_entropy, gradient_accumulation_steps=k)
    trainer.run(DataLoader(data, batch_size=b), max_epochs=1)
elif mode == "fastai":
    from fastai.basics import DataLoaders, Learner, OptimWrapper
    from fastai.callback.training import GradientAccumulation

    loaders = DataLoaders(DataLoader(data, batch_size=b), DataLoader(data, batch_size=b))
    learner = Learner(
        loaders,
        model,
        loss_func=nn.CrossEntropyLoss(),
        opt_func=lambda parameters, **more: OptimWrapper(parameters, torch.optim.SGD, **more),
        cbs=[GradientAccumulation(n_acc=b * k)],
    )
    with learner.no_bar():
        learner.fit(1, lr=RATE)
elif mode == "accelerated":
    from pytorch_accelerated import Trainer

    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    trainer = Trainer(model=model, loss_func=nn.CrossEntropyLoss(), optimizer=make_optimizer(), callbacks=[])
    trainer.train(train_dataset=data, num_epochs=1, per_device_batch_size=b, gradient_accumulation_steps=k)
elif mode == "torchtnt":
    from torchtnt.framework.auto_unit import AutoUnit
    from torchtnt.framework.train import train

    class Unit(AutoUnit):
        def compute_loss(self, state, batch):
            x, y = batch
            outputs = self.module(x)
            return F.cross_entropy(outputs, y), outputs

        def configure_optimizers_and_lr_scheduler(self, module):
            return make_optimizer(module.parameters()), None

    unit = Unit(module=model, device=torch.device("cpu"), gradient_accumulation_steps=k)
    train(unit, DataLoader(data, batch_size=b), max_epochs=1)
else:
    from skorch import NeuralNetClassifier

    class Net(NeuralNetClassifier):
        def get_loss(self, *args, **kwargs):
            return super().get_loss(*args, **kwargs) / k

        def train_step(self, batch, **fit_params):
            step = self.train_step_single(batch, **fit_params)
            if len(self.history[-1, "batches"]) % k == 0:
                self.optimizer_.step()
                self.optimizer_.zero_grad()
            return step

    net = Net(
        model,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        lr=RATE,
        max_epochs=1,
        batch_size=b,
        train_split=None,
        verbose=0,
    )
    net.fit(inputs.numpy(), classes.numpy())
