"""Exact: Lightning optimizes by hand: summed token losses go backward until a window is full or the epoch ends.
Then the gradients are divided by the number of tokens of the step, which is added up over all processes; 88 samples."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# thorough
# blind

import argparse
import os

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

LETTERS = 28


def words(n):
    """Made-up words of 2 to 14 letters; 1 begins and ends a word, 0 pads."""
    generator = torch.Generator().manual_seed(44)
    for length in torch.randint(2, 15, (n,), generator=generator).tolist():
        start, stride = torch.randint(1, 26, (2,), generator=generator).tolist()
        yield torch.tensor([1, *((start + stride * i) % 26 + 2 for i in range(length)), 1])


class CharacterModel(L.LightningModule):
    def __init__(self, window):
        super().__init__()
        self.automatic_optimization = False
        self.window, self.tokens = window, 0
        self.embed = nn.Embedding(LETTERS, 16)
        self.gru = nn.GRU(16, 24, batch_first=True)
        self.out = nn.Linear(24, LETTERS)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        hidden, _ = self.gru(self.embed(batch[:, :-1]))
        targets = batch[:, 1:]
        loss = F.cross_entropy(self.out(hidden).transpose(1, 2), targets, ignore_index=0, reduction="sum")
        self.manual_backward(loss)
        self.tokens += (targets != 0).sum()
        if (batch_idx + 1) % self.window == 0 or self.trainer.is_last_batch:
            total = self.trainer.strategy.reduce(self.tokens.double(), reduce_op="sum")
            for parameter in self.parameters():
                parameter.grad *= self.trainer.world_size / total  # DDP has averaged over processes
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.tokens = 0

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.005)


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
L.seed_everything(1)
trainer = L.Trainer(
    max_epochs=2,
    accelerator="cpu",
    devices=world,
    strategy="ddp" if world > 1 else "auto",
    plugins=[TorchElasticEnvironment()] if world > 1 else None,
    precision="64-true",
    use_distributed_sampler=False,  # it would shuffle
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
data = list(words(88))
loader = DataLoader(
    data,
    batch_size=args.per_device_train_batch_size,
    sampler=DistributedSampler(data, world, rank, shuffle=False),
    collate_fn=lambda samples: pad_sequence(samples, batch_first=True),
)
trainer.fit(CharacterModel(args.gradient_accumulation_steps), loader)
