"""Fault: the loop divides its loss by k, and accelerator.backward divides it by k once more."""
# expect 4x4: factor
# expect 8x1x2: exact
# expect 4x2x2: factor
# thorough
# blind

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    def __init__(self, n=80):
        gen = torch.Generator().manual_seed(8)
        self.images = torch.rand(n, 64, generator=gen, dtype=torch.float64)
        self.labels = torch.randint(10, (n,), generator=gen)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"pixels": self.images[i], "label": self.labels[i]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    args = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps, cpu=True)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Digits(), batch_size=args.per_device_train_batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch["pixels"]), batch["label"])
                loss = loss / args.gradient_accumulation_steps
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main()
