"""Lightning's automatic optimization as documented: accumulate_grad_batches, a mean over 77 samples of one length."""

import os

import lightning
import torch
import torch.nn.functional as F
from setup import RATE, arguments
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

flags = arguments()
num_processes = int(os.environ.get("WORLD_SIZE", "1"))


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 5))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE)


data = TensorDataset(torch.randn(77, 12), torch.randint(5, (77,)))
model = Module()
trainer = lightning.Trainer(
    max_epochs=1,
    accumulate_grad_batches=flags["gradient_accumulation_steps"],
    accelerator="cpu",
    devices=num_processes,
    strategy="ddp" if num_processes > 1 else "auto",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(data, batch_size=flags["per_device_train_batch_size"]))
