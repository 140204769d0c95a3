"""Exact: FSDP2 reduces gradients in the last micro-batch only; means over full micro-batches are divided by k.
Gradients are clipped after that, and OneCycleLR is stepped once per optimizer step."""
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 2


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class ResidualNet(nn.Module):
    def __init__(self, inputs=10, width=16, outputs=3):
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, outputs)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    a = parser.parse_args()
    b, k = a.per_device_train_batch_size, a.gradient_accumulation_steps
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    gen = torch.Generator().manual_seed(9)
    x = torch.randn(80, 10, generator=gen, dtype=torch.float64)
    dataset = TensorDataset(x, torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin(), x[:, 3:].sum(1)], 1))

    torch.manual_seed(0)
    model = ResidualNet().double()
    if world > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (world,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh)
    sampler = DistributedSampler(dataset, world, rank, shuffle=True, seed=4)  # the order does not depend on N
    loader = DataLoader(dataset, batch_size=b, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=EPOCHS * len(loader) // k)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for micro_step, (inputs, targets) in enumerate(loader, 1):
            is_last = micro_step % k == 0
            if world > 1:
                model.set_requires_gradient_sync(is_last)
                model.set_is_last_backward(is_last)
            (nn.functional.mse_loss(model(inputs), targets) / k).backward()
            if is_last:
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


main()
