"""Exact: Lightning runs its ddp strategy under torchrun, with a sampler whose order is the same for any N.
The loss is a mean over ratings, and every process gets the same number of full micro-batches."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# thorough
# blind

import argparse
import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

USERS, ITEMS = 30, 40


def ratings(n):
    generator = torch.Generator().manual_seed(12)
    users = torch.randint(USERS, (n,), generator=generator)
    items = torch.randint(ITEMS, (n,), generator=generator)
    stars = 1 + (users * 7 + items * 3) % 5 + 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)
    return TensorDataset(users, items, stars)


class Recommender(pl.LightningModule):
    """Neural matrix factorization: rating of an item by a user."""

    def __init__(self, width=12):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, width), nn.Embedding(ITEMS, width)
        self.mixer = nn.Sequential(nn.Linear(2 * width, 16), nn.SiLU(), nn.Linear(16, 1))
        self.double()

    def forward(self, users, items):
        u, v = self.users(users), self.items(items)
        return self.mixer(torch.cat([u, v], dim=-1)).squeeze(-1) + (u * v).sum(-1)

    def training_step(self, batch, batch_idx):
        users, items, stars = batch
        return nn.functional.mse_loss(self(users, items), stars)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9, nesterov=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    args = parser.parse_args()
    rank, num_processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if num_processes > 1:
        # The address and the ranks come from torchrun.
        launch = {"strategy": DDPStrategy(process_group_backend="gloo"), "plugins": [TorchElasticEnvironment()]}
    else:
        launch = {"strategy": "auto"}

    pl.seed_everything(7)
    model = Recommender()
    trainer = pl.Trainer(
        max_epochs=2,
        num_nodes=1,
        devices=num_processes,
        accelerator="cpu",
        accumulate_grad_batches=args.gradient_accumulation_steps,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **launch,
    )
    data = ratings(80)
    sampler = DistributedSampler(data, num_processes, rank, seed=2)  # Lightning calls its set_epoch
    trainer.fit(model, DataLoader(data, batch_size=args.per_device_train_batch_size, sampler=sampler))


if __name__ == "__main__":
    main()
