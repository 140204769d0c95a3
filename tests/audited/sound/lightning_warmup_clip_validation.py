"""Exact: Lightning warms the rate up and lets it decay per optimizer step, clips by norm, and validates every two steps.
The number of steps is Lightning's estimate, which knows of accumulation; all micro-batches are full."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# thorough
# blind

import argparse
import math
import os

import torch
from lightning import LightningDataModule, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


class Waves(LightningDataModule):
    """Windows of noisy waves, whose next value is to be told."""

    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        generator = torch.Generator().manual_seed(9)
        start = 6 * torch.rand(100, 1, generator=generator, dtype=torch.float64)
        speed = 0.2 + torch.rand(100, 1, generator=generator, dtype=torch.float64)
        series = torch.sin(start + speed * torch.arange(13)) + 0.3 * torch.cos(2 * speed * torch.arange(13))
        whole = TensorDataset(series[:, :-1], series[:, -1:])
        self.train, self.val = random_split(whole, [80, 20], generator=generator)

    def train_dataloader(self):
        world, rank = self.trainer.world_size, self.trainer.global_rank
        return DataLoader(self.train, self.batch_size, sampler=DistributedSampler(self.train, world, rank, seed=4))

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=10)


class Forecaster(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 24), nn.ELU(), nn.Linear(24, 24), nn.ELU(), nn.Linear(24, 1)).double()

    def training_step(self, batch, batch_idx):
        past, future = batch
        return nn.functional.smooth_l1_loss(self.net(past), future, beta=0.1)

    def validation_step(self, batch, batch_idx):
        past, future = batch
        self.log("val_error", (self.net(past) - future).abs().mean(), sync_dist=True)

    def configure_optimizers(self):
        total = self.trainer.estimated_stepping_batches
        warmup = max(1, total // 5)

        def factor(step):
            if step < warmup:
                return (step + 1) / warmup
            return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))

        optimizer = torch.optim.RMSprop(self.parameters(), lr=0.003)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    args = parser.parse_args()
    seed_everything(0)
    devices = int(os.environ.get("WORLD_SIZE", 1))
    trainer = Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        accumulate_grad_batches=args.gradient_accumulation_steps,
        use_distributed_sampler=False,
        gradient_clip_val=0.3,
        val_check_interval=2 * args.gradient_accumulation_steps,  # counted in batches
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Forecaster(), datamodule=Waves(args.per_device_train_batch_size))
