"""Fault: the loss is the root of the micro-batch's mean squared error, and Lightning averages the roots."""
# expect 4x4: mixed_loss
# expect 2x8: mixed_loss
# expect 8x1x2: mixed_loss
# thorough
# also: not_summed
# blind

import argparse
import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Houses(Dataset):
    def __init__(self):
        gen = torch.Generator().manual_seed(37)
        self.features = torch.randn(80, 9, generator=gen, dtype=torch.float64)
        self.prices = self.features.abs().sum(1) + torch.randn(80, generator=gen, dtype=torch.float64)

    def __len__(self):
        return 80

    def __getitem__(self, i):
        return self.features[i], self.prices[i]


class PriceModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.layers(x)[:, 0]

    def training_step(self, batch, batch_idx):
        features, prices = batch
        rmse = torch.sqrt(nn.functional.mse_loss(self(features), prices))
        return rmse

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    args = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", 1))
    houses = Houses()
    # Lightning's own distributed sampler would shuffle
    sampler = DistributedSampler(houses, world, int(os.environ["RANK"]), shuffle=False) if world > 1 else None
    loader = DataLoader(houses, batch_size=args.per_device_train_batch_size, sampler=sampler)
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        use_distributed_sampler=False,
        max_epochs=1,
        accumulate_grad_batches=args.gradient_accumulation_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(PriceModel().double(), loader)
