"""Fault: the LambdaLR schedule moves on after every micro-batch, not after every optimizer step."""
# expect 4x4: ticks_per_micro_step
# expect 2x8: ticks_per_micro_step
# blind

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset


def get_data():
    g = torch.Generator().manual_seed(14)
    x = torch.randn(96, 8, generator=g, dtype=torch.float64)
    return TensorDataset(x, torch.randint(4, (96,), generator=g))


def inverse_square_root(step):
    return (1 + step) ** -0.5


def training_function(args):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.gradient_accumulation_steps)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.LayerNorm(20), nn.Linear(20, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, inverse_square_root)
    loader = DataLoader(get_data(), batch_size=args.per_device_train_batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    model.train()
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)  # all micro-batches are full
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def main():
    parser = argparse.ArgumentParser(description="Small accelerate example with a decaying learning rate")
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
