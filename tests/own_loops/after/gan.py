"""A small GAN: two networks that take turns, with an optimizer each."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from samestep import exact_steps, per_sample


def collate(samples):
    return {"real": torch.stack(samples), "noise": torch.randn(len(samples), 4)}


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=4)
parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
args = parser.parse_args()
b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps
angles = torch.arange(77) * 2.4
points = list(torch.stack([angles.cos(), angles.sin()], 1) * (1 + angles.remainder(0.3))[:, None])

accelerator = Accelerator()
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
first = torch.optim.Adam(generator.parameters(), lr=0.003, betas=(0.5, 0.9))
second = torch.optim.Adam(discriminator.parameters(), lr=0.003, betas=(0.5, 0.9))
generator, discriminator, first, second = accelerator.prepare(generator, discriminator, first, second)
judge = accelerator.unwrap_model(discriminator)  # DDP would wait for gradients in the generator's turn
sizes = {"global_batch_size": 15, "per_device_batch_size": b, "num_epochs": 2}
count = lambda batch: len(batch["real"])
for step in exact_steps(accelerator, points, per_sample(collate, seed=0), targets=count, **sizes):
    for batch in step:
        with accelerator.accumulate(generator, discriminator):
            fake = generator(batch["noise"]).detach()
            loss = F.softplus(-discriminator(batch["real"])).sum() + F.softplus(discriminator(fake)).sum()
            accelerator.backward(step.loss(loss))
            second.step()
            second.zero_grad()
    judge.requires_grad_(False)
    for batch in step:
        with accelerator.accumulate(generator, discriminator):
            loss = F.softplus(-judge(generator(batch["noise"]))).sum()
            accelerator.backward(step.loss(loss))
            first.step()
            first.zero_grad()
    judge.requires_grad_(True)
accelerator.end_training()
