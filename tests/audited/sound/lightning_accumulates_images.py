"""Exact: Lightning accumulates by itself (accumulate_grad_batches) the mean loss of a small image classifier.
All micro-batches have the same number of images, and every epoch ends with a full window; the norm is a layer norm."""
# expect 4x4: exact
# expect 2x8: exact
# expect 1x16: exact
# thorough
# blind

import argparse
import logging

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIDE, CLASSES = 10, 4


class Stripes(Dataset):
    """Images with horizontal, vertical, diagonal or no stripes, under noise."""

    def __init__(self, n):
        generator = torch.Generator().manual_seed(3)
        self.noise = 0.5 * torch.randn(n, 1, SIDE, SIDE, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(CLASSES, (n,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        row, column = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
        label = int(self.labels[index])
        phase = [row, column, row + column, torch.zeros_like(row)][label]
        return self.noise[index] + (phase % 3 == 0), label


class Classifier(L.LightningModule):
    def __init__(self, learning_rate=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.features = nn.Sequential(nn.Conv2d(1, 6, 3), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.LayerNorm(96))
        self.head = nn.Linear(96, CLASSES)

    def forward(self, images):
        return self.head(self.features(images))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels, label_smoothing=0.1)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate, weight_decay=0.05)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    L.seed_everything(0)
    loader = DataLoader(
        Stripes(96),
        batch_size=args.per_device_train_batch_size,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(5),
    )
    trainer = L.Trainer(
        max_epochs=2,
        accumulate_grad_batches=args.gradient_accumulation_steps,
        accelerator="cpu",
        devices=1,
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loader)
    print(f"last loss {trainer.callback_metrics['train_loss']:.4f} after {trainer.global_step} steps")


if __name__ == "__main__":
    main()
