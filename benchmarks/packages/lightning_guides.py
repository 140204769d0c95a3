"""Loops in the style of Lightning's guides: accumulation under manual optimization, and with Fabric.

Our own code after lightning.ai/docs/pytorch/stable/model/manual_optimization.html, which steps where (batch_idx + 1) % N == 0,
and lightning.ai/docs/fabric/stable/advanced/gradient_accumulation.html, which steps where iteration % N == 0.
"""

import os
import sys

import lightning
import torch
import torch.nn.functional as F
from setup import RATE, arguments
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

mode = sys.argv.pop(1)  # manual or fabric
flags = arguments()
b, k = flags["per_device_train_batch_size"], flags["gradient_accumulation_steps"]
num_processes = int(os.environ.get("WORLD_SIZE", "1"))
plan = {"accelerator": "cpu", "devices": num_processes, "strategy": "ddp" if num_processes > 1 else "auto"}


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.model = network

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.manual_backward(F.cross_entropy(self.model(x), y) / k)
        if (batch_idx + 1) % k == 0:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE)


network = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 5))
loader = DataLoader(TensorDataset(torch.randn(77, 12), torch.randint(5, (77,))), batch_size=b)
if mode == "manual":
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    lightning.Trainer(max_epochs=1, **plan, **quiet).fit(Module(), loader)
else:
    fabric = lightning.Fabric(**plan)
    fabric.launch()
    model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=RATE))
    loader = fabric.setup_dataloaders(loader)
    for iteration, (x, y) in enumerate(loader):
        is_accumulating = iteration % k != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            fabric.backward(F.cross_entropy(model(x), y))
        if not is_accumulating:
            optimizer.step()
            optimizer.zero_grad()
