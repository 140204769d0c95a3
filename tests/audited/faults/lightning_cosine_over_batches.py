"""Fault: the period of the cosine schedule is the number of batches, but Lightning ticks it once per optimizer
step."""
# expect 4x4: learning_rate
# expect 2x8: learning_rate
# blind

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 2


class Regressor(lightning.LightningModule):
    def __init__(self, num_batches):
        super().__init__()
        self.num_batches = num_batches
        self.net = nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.net(x).squeeze(1), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * self.num_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
gen = torch.Generator().manual_seed(29)
x = torch.randn(80, 5, generator=gen, dtype=torch.float64)
loader = DataLoader(TensorDataset(x, x.sin().sum(1)), batch_size=args.per_device_train_batch_size)
lightning.seed_everything(0, verbose=False)
model = Regressor(num_batches=len(loader)).double()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=1,
    max_epochs=EPOCHS,
    accumulate_grad_batches=args.gradient_accumulation_steps,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, loader)
