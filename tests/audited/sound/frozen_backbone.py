"""Exact: a frozen backbone stays in eval mode, so its batch norm and dropout depend on no micro-batch.
Only the later blocks learn, with layer-wise rates that a plain function sets before every step; DDP, 77 samples."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# expect 2x4x2: exact
# thorough
# blind

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def noisy_images(n, seed):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(n, 1, 8, 8, generator=gen, dtype=torch.float64), torch.randint(4, (n,), generator=gen)


class Finetuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout2d(0.2), nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8)
        )
        self.layers = nn.ModuleList([nn.Conv2d(8, 8, 3), nn.Linear(32, 16), nn.Linear(16, 4)])

    def pretrain(self):
        """Stands for the loading of a checkpoint: fills the running statistics, and freezes."""
        with torch.no_grad():
            for seed in range(5):
                self.backbone(noisy_images(16, 100 + seed)[0])
        self.backbone.requires_grad_(False)
        return self.train()

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        x = F.relu(self.layers[0](F.relu(self.backbone(x))))
        return self.layers[2](torch.tanh(self.layers[1](x.flatten(1))))


def groups(model, decay=0.6):
    """Rates fall from the head down; neither biases nor norms are decayed."""
    for depth, layer in enumerate(reversed(model.layers)):
        scale = decay**depth
        yield {"params": [layer.weight], "scale": scale, "weight_decay": 0.05}
        yield {"params": [layer.bias], "scale": scale, "weight_decay": 0.0}


def rate(step, warmup=2, total=10, peak=0.01):
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


p = argparse.ArgumentParser()
p.add_argument("--per_device_train_batch_size", type=int, default=16)
p.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = p.parse_args()
b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
net = Finetuned().double().pretrain()
model = DDP(net) if world > 1 else net
optimizer = torch.optim.AdamW(list(groups(net)), lr=0.0)
images, labels = noisy_images(77, 7)

step = 0
for _epoch in range(2):
    model.train()
    for rows in torch.arange(77).split(b * k * world):
        micro_batches = rows[rank::world].split(b)
        for i, micro in enumerate(micro_batches, 1):
            if world > 1:
                model.require_backward_grad_sync = i == len(micro_batches)
            loss = F.cross_entropy(model(images[micro]), labels[micro], reduction="none")
            (loss.sum() * world / len(rows)).backward()
        for group in optimizer.param_groups:
            group["lr"] = rate(step) * group["scale"]
        optimizer.step()
        optimizer.zero_grad()
        step += 1
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
