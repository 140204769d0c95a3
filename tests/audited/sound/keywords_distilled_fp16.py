"""Sound: a teacher in .half() distils spoken keywords into an fp16 student; KL of batchmean and the labels'
mean are each divided by k."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 2
# thorough

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FULL = os.environ.get("FULL") == "1"
dtype, half = (torch.float64, torch.float64) if FULL else (torch.float32, torch.float16)
world = int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
T = 2.0
g = torch.Generator().manual_seed(36)
data = TensorDataset(torch.randn(80, 10, 20, generator=g).to(dtype), torch.randint(8, (80,), generator=g))


def net(width):
    return nn.Sequential(
        nn.Conv1d(10, width, 5, stride=2), nn.GroupNorm(2, width), nn.ReLU(), nn.Conv1d(width, width, 3), nn.ReLU(),
        nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(width, 8),
    )  # fmt: skip


torch.manual_seed(0)
teacher = net(48).to(half).eval().requires_grad_(False)
student, sampler = net(12).to(dtype), None
if world > 1:
    dist.init_process_group("gloo")
    student, sampler = DDP(student), DistributedSampler(data, shuffle=False)
optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
for i, (x, y) in enumerate(DataLoader(data, batch_size=b, sampler=sampler)):
    stepping = (i + 1) % k == 0
    with torch.inference_mode():
        soft = F.softmax(teacher(x.to(half)).to(dtype) / T, -1)
    with nullcontext() if world == 1 or stepping else student.no_sync():
        with torch.autocast("cpu", torch.float16, enabled=not FULL):
            logits = student(x)
        logits = logits.to(dtype)
        kl = F.kl_div(F.log_softmax(logits / T, -1), soft.clone(), reduction="batchmean") * T * T
        ((0.7 * kl + 0.3 * F.cross_entropy(logits, y)) / k).backward()
    if stepping:
        nn.utils.clip_grad_norm_(student.parameters(), 2.0)
        optimizer.step()
        optimizer.zero_grad()
