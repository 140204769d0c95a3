"""Exact: a Wasserstein critic has a gradient penalty per sample (create_graph=True), at points that are fixed in the data.
Critic and generator take steps by turns, and each accumulates sums over the step's samples of all processes; 77 samples."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# expect 2x4x2: exact
# thorough
# blind

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

CRITIC_STEPS = 2


def penalty(critic, real, fake, mix):
    """Sum over samples of (norm of the critic's gradient - 1) ** 2."""
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.norm(dim=1) - 1).square().sum()


def all_reduce(module):
    if dist.is_initialized():
        for p in module.parameters():
            dist.all_reduce(p.grad)


p = argparse.ArgumentParser()
p.add_argument("--per_device_train_batch_size", type=int, default=16)
p.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = p.parse_args()
b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")

gen = torch.Generator().manual_seed(6)
angle = 6.3 * torch.rand(77, generator=gen, dtype=torch.float64)
real = torch.stack([angle.cos(), angle.sin()], 1)
noise = torch.randn(CRITIC_STEPS + 1, 77, 3, generator=gen, dtype=torch.float64)
mix = torch.rand(77, 1, generator=gen, dtype=torch.float64)

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(3, 16), nn.Softplus(), nn.Linear(16, 2)).double()
critic = nn.Sequential(nn.Linear(2, 16), nn.Softplus(), nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 1)).double()
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.0, 0.9))
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.9))

for rows in torch.arange(77).split(b * k * world):
    micro_batches = rows[rank::world].split(b)
    for turn in range(CRITIC_STEPS):
        critic_optimizer.zero_grad()
        for micro in micro_batches:
            with torch.no_grad():
                fake = generator(noise[turn, micro])
            loss = (critic(fake) - critic(real[micro])).sum() + 10 * penalty(critic, real[micro], fake, mix[micro])
            (loss / len(rows)).backward()
        all_reduce(critic)
        critic_optimizer.step()

    critic.requires_grad_(False)
    generator_optimizer.zero_grad()
    for micro in micro_batches:
        (-critic(generator(noise[-1, micro])).sum() / len(rows)).backward()
    all_reduce(generator)
    generator_optimizer.step()
    critic.requires_grad_(True)

if world > 1:
    dist.barrier()
    dist.destroy_process_group()
