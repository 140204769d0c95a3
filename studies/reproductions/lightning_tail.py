"""Lightning's automatic accumulation: the last window of an epoch is divided by k, though it has fewer micro-batches."""

import sys

import lightning
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector as flatten
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def training_step(self, batch, _):
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


torch.manual_seed(0)
b, k, model, inputs, labels = 2, 4, Module(), torch.randn(3, 8).double(), torch.tensor([0, 1, 2])
model.net = torch.nn.Linear(8, 3).double()
truth = flatten(torch.autograd.grad(cross_entropy(model.net(inputs), labels), model.parameters()))
before = flatten(model.parameters()).detach()
trainer = lightning.Trainer(max_epochs=1, accumulate_grad_batches=k, accelerator="cpu", barebones=True)
trainer.fit(model, DataLoader(TensorDataset(inputs, labels), b))
error = ((before - flatten(model.parameters()).detach() - truth).norm() / truth.norm()).item()  # SGD with rate 1
print("wrong:" if error > 1e-5 else "right:", f"gradient with an error of {error:.2g}")
sys.exit(error > 1e-5)
