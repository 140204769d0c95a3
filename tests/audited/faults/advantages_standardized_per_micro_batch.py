"""Fault: PPO standardizes the advantages of each micro-batch by its own mean and deviation, not by those of the
step."""
# expect 4x4: mixed_loss
# expect 2x8: mixed_loss
# expect 8x1x2: mixed_loss
# thorough
# also: not_a_sum
# blind

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

CLIP = 0.2


def surrogate(log_prob, old_log_prob, advantage):
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = (log_prob - old_log_prob).exp()
    return -torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()


def main(b, k, rank, world):
    gen = torch.Generator().manual_seed(99)
    observations = torch.randn(80, 6, generator=gen, dtype=torch.float64)
    actions = torch.randint(4, (80,), generator=gen)
    advantages = 3 * torch.randn(80, generator=gen, dtype=torch.float64) + 1

    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 4)).double()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)

    def log_probs(rows):
        return policy(observations[rows]).log_softmax(-1).gather(1, actions[rows, None]).squeeze(1)

    with torch.no_grad():
        old = log_probs(torch.arange(80))
    for _ in range(2):  # epochs on the same rollout
        for i, rows in enumerate(torch.arange(80)[rank::world].split(b)):
            loss = surrogate(log_probs(rows), old[rows], advantages[rows])
            (loss / k).backward()
            if (i + 1) % k:
                continue
            if world > 1:
                for p in policy.parameters():
                    dist.all_reduce(p.grad)
                    p.grad.div_(world)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    args = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    main(args.per_device_train_batch_size, args.gradient_accumulation_steps, int(os.environ.get("RANK", 0)), world)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
