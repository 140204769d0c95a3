"""Fault: the teacher's logits, targets of the student, are centred a little over the micro-batch instead of
over all images."""
# expect 4x4: mixed_loss
# expect 2x8: mixed_loss
# expect 8x1x2: mixed_loss
# also: mixed_samples, other_inputs
# size: 0.032
# blind 2
# thorough

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FULL = os.environ.get("FULL") == "1"
dtype, half = (torch.float64, torch.float64) if FULL else (torch.float32, torch.float16)
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
views = torch.randn(80, 2, 3, 8, 8, generator=torch.Generator().manual_seed(5)).to(dtype)
views[:, 1] = views[:, 0] + 0.2 * views[:, 1]


def backbone():
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, stride=2), nn.GELU(), nn.Flatten(), nn.LayerNorm(108), nn.Linear(108, 32), nn.GELU(),
        nn.Linear(32, 16),
    )  # fmt: skip


torch.manual_seed(0)
teacher = backbone().to(half).requires_grad_(False)
student = backbone().to(dtype)
if world > 1:
    dist.init_process_group("gloo")
    student = DistributedDataParallel(student)
optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
for i, start in enumerate(range(rank * b, 80, b * world)):
    images = views[start : start + b]
    last = (i + 1) % k == 0
    with torch.no_grad():
        logits = teacher(images[:, 0].to(half)).to(dtype)
        target = ((logits - 0.1 * logits.mean(0)) / 0.2).softmax(-1)
    with nullcontext() if world == 1 or last else student.no_sync():
        with torch.autocast("cpu", dtype=torch.float16, enabled=not FULL):
            out = student(images[:, 1])
        loss = -(target * (out.to(dtype) / 0.5).log_softmax(-1)).sum(-1).mean()
        (loss / k).backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
