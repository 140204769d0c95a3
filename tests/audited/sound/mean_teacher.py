"""Exact: a student learns from labels and from a teacher, its moving average, which is updated once per step.
Both are evaluated between steps with the same loader, and hooks note the norms of gradients; full micro-batches, DDP."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# expect 2x4x2: exact
# thorough
# blind

import argparse
import os
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset


def two_views(n=80):
    """Points of three clusters: a clean view, a noisy one, and the cluster."""
    gen = torch.Generator().manual_seed(21)
    cluster = torch.randint(3, (n,), generator=gen)
    clean = torch.randn(n, 6, generator=gen, dtype=torch.float64) + 2 * F.one_hot(cluster, 6)
    noisy = clean + 0.3 * torch.randn(n, 6, generator=gen, dtype=torch.float64)
    return TensorDataset(clean, noisy, cluster)


@torch.no_grad()
def accuracy(model, loader):
    was_training = model.training
    model.eval()
    right = sum(int((model(clean).argmax(1) == y).sum()) for clean, _, y in loader)
    model.train(was_training)
    return right / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    args = parser.parse_args()
    b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    dataset = two_views()
    mine = torch.utils.data.Subset(dataset, range(rank, len(dataset), world))
    loader = DataLoader(mine, batch_size=b)

    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(6, 18), nn.GroupNorm(3, 18), nn.ReLU(), nn.Linear(18, 3)).double()
    teacher = AveragedModel(student, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    norms = defaultdict(list)
    for name, p in student.named_parameters():
        p.register_hook(lambda g, name=name: norms[name].append(float(g.norm())))
    wrapped = DistributedDataParallel(student) if world > 1 else student
    optimizer = torch.optim.SGD(student.parameters(), lr=0.2, momentum=0.9, nesterov=True)

    num_steps = 0
    for _epoch in range(2):
        for i, (clean, noisy, y) in enumerate(loader, 1):
            if world > 1:
                wrapped.require_backward_grad_sync = i % k == 0
            with torch.no_grad():
                belief = teacher(clean).softmax(1)
            logits = wrapped(noisy)
            consistency = F.mse_loss(logits.softmax(1), belief)
            loss = F.cross_entropy(logits, y) + min(1.0, num_steps / 5) * consistency
            (loss / k).backward()
            if i % k == 0:
                optimizer.step()
                optimizer.zero_grad()
                teacher.update_parameters(student)
                num_steps += 1
                if num_steps % 3 == 0:
                    print(num_steps, accuracy(student, loader), accuracy(teacher, loader), max(norms["0.weight"]))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
