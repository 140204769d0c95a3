"""Exact: Accelerate accumulates a mean loss by itself; the loader is prepared, seeded and shuffled, and full everywhere.
The scheduler is not prepared, and ticks when gradients are in step, as does the clipping; even_batches has nothing to fill."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# thorough
# blind

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Denoiser(nn.Module):
    """Rids short signals of noise: a residual of convolutions with group norm."""

    def __init__(self, channels=12):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, channels, 5, padding=2),
            nn.GroupNorm(3, channels),
            nn.SiLU(),
            nn.Conv1d(channels, channels, 3, padding=1),
            nn.GroupNorm(3, channels),
            nn.SiLU(),
            nn.Conv1d(channels, 1, 3, padding=1),
        )

    def forward(self, noisy):
        return noisy - self.net(noisy)


def signals(n, length=24):
    generator = torch.Generator().manual_seed(10)
    phase, pace = 6 * torch.rand(2, n, 1, 1, generator=generator, dtype=torch.float64)
    clean = torch.sin(phase + pace * torch.linspace(0, 2, length, dtype=torch.float64))
    return TensorDataset(clean + 0.3 * torch.randn(clean.shape, generator=generator, dtype=torch.float64), clean)


def evaluate(accelerator, model, loader):
    model.eval()
    errors = []
    with torch.no_grad():
        for noisy, clean in loader:
            errors.append(accelerator.gather_for_metrics((model(noisy) - clean).square().mean((1, 2))))
    model.train()
    return torch.cat(errors).mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    args = parser.parse_args()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, even_batches=True),
    )
    set_seed(1)
    train = DataLoader(signals(96), batch_size=args.per_device_train_batch_size, shuffle=True)
    held_out = DataLoader(signals(22), batch_size=8)
    model = Denoiser().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    model, optimizer, train, held_out = accelerator.prepare(model, optimizer, train, held_out)
    for epoch in range(2):
        for noisy, clean in train:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(noisy), clean)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
        error = evaluate(accelerator, model, held_out)
        accelerator.print(f"epoch {epoch}: {error:.5f}")
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
