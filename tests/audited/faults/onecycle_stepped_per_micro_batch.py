"""Fault: OneCycleLR spans the micro-batches of the loader and moves on after each, not after each optimizer step."""
# expect 4x4: ticks_per_micro_step
# expect 2x8: ticks_per_micro_step
# thorough
# blind

import argparse
import logging
import warnings

import lightning as L
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class LitRegressor(L.LightningModule):
    def __init__(self, accumulate, total_steps):
        super().__init__()
        self.automatic_optimization = False
        self.accumulate, self.total_steps = accumulate, total_steps
        self.net = nn.Sequential(nn.Linear(5, 24), nn.Softplus(), nn.Linear(24, 1)).double()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.huber_loss(self.net(x), y)
        self.manual_backward(loss / self.accumulate)
        if (batch_idx + 1) % self.accumulate == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()
        self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        cycle = OneCycleLR(optimizer, max_lr=0.2, total_steps=self.total_steps, cycle_momentum=False)
        return [optimizer], [cycle]


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
g = torch.Generator().manual_seed(19)
x = torch.randn(96, 5, generator=g, dtype=torch.float64)
loader = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=args.per_device_train_batch_size)
torch.manual_seed(0)
module = LitRegressor(args.gradient_accumulation_steps, total_steps=len(loader))
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
L.Trainer(accelerator="cpu", devices=1, max_epochs=1, **quiet).fit(module, loader)
