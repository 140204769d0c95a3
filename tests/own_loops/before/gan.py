"""A small GAN: two networks that take turns, with an optimizer each."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader


def collate(samples):
    return {"real": torch.stack(samples), "noise": torch.randn(len(samples), 4)}


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=4)
parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
args = parser.parse_args()
b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps
angles = torch.arange(77) * 2.4
points = list(torch.stack([angles.cos(), angles.sin()], 1) * (1 + angles.remainder(0.3))[:, None])

accelerator = Accelerator(gradient_accumulation_steps=k)
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
first = torch.optim.Adam(generator.parameters(), lr=0.003, betas=(0.5, 0.9))
second = torch.optim.Adam(discriminator.parameters(), lr=0.003, betas=(0.5, 0.9))
loader = DataLoader(points, batch_size=b, collate_fn=collate, shuffle=True)
generator, discriminator, first, second, loader = accelerator.prepare(generator, discriminator, first, second, loader)
for epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(generator, discriminator):
            second.zero_grad()
            fake = generator(batch["noise"]).detach()
            loss = F.softplus(-discriminator(batch["real"])).mean() + F.softplus(discriminator(fake)).mean()
            accelerator.backward(loss)
            second.step()
            first.zero_grad()
            loss = F.softplus(-discriminator(generator(batch["noise"]))).mean()
            accelerator.backward(loss)
            first.step()
accelerator.end_training()
