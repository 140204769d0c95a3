"""Optimizers that accumulate, on one of several processes over gloo, which forked.Server starts; the micro-batches that
all of them share."""

import contextlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from samestep.contrib.optim import folding
from samestep.step.optim import AccumulatingAdamW, AccumulatingSGD

STEPS = 50
MICRO_BATCHES = {1: [[3, 1, 4, 2]], 2: [[3, 1, 4], [2]], 3: [[3, 1], [], [4, 2]]}
"""Samples of each process's micro-batches: of one step the same ones on any number of processes."""
OPTIMIZERS = {
    "sgd": lambda groups: AccumulatingSGD(groups, 0.05, 0.9),
    **{
        name: lambda groups, name=name: AccumulatingAdamW(groups, 0.01, (0.9, 0.99), second_moment=name)
        for name in ("unbiased", "mean_of_squares", "sum_of_squares")
    },
}


class Network(nn.Module):
    """Two groups of parameters, one tensor that is projected, one that is frozen, one that only some micro-batches use."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(70, 80), nn.Linear(80, 3)
        self.frozen, self.seldom = nn.Linear(80, 80), nn.Parameter(torch.ones(3))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        scores = self.last(torch.tanh(self.frozen(torch.tanh(self.first(x)))))
        return scores * self.seldom if len(x) > 2 else scores


def build(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return Network().double()


def groups(network: Network) -> list[dict]:
    matrices = [network.first.weight, network.frozen.weight, network.last.weight]
    others = [network.first.bias, network.frozen.bias, network.last.bias, network.seldom]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]


def micro_batch_losses(network: nn.Module, step: int):
    """Yield each micro-batch's share of the step's loss, which is a mean over samples."""
    generator = torch.Generator().manual_seed(step)
    sizes = [3, 1, 4, 2]
    for size in sizes:
        x = torch.randn(size, 70, generator=generator, dtype=torch.float64)
        yield size, lambda x=x: network(x).square().sum() / sum(sizes)


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    folding.BUCKET = 1000  # so that there are several
    sizes, results = MICRO_BATCHES[size][rank], {}
    for name, make in OPTIMIZERS.items():
        network = build(seed=rank)
        optimizer = make(groups(network))
        optimizer.distribute(network)
        early = []
        for step in range(STEPS):
            optimizer.gradient_accumulation_steps = max(1, len(sizes))
            optimizer.num_micro_batches = 4
            losses = dict(micro_batch_losses(network, step))
            for micro_batch in sizes:
                (losses[micro_batch]() * size).backward()  # of which DistributedDataParallel would take the mean
            early.append(optimizer._num_launched)
            norm = optimizer.clip_grad_norm_()
            optimizer.step()
        state = [value for tensors in optimizer.state.values() for value in tensors.values()]
        results[name] = {
            "parameters": list(network.parameters()),
            "state": state,
            "norm": norm,
            "early": early,
            "buckets": len(optimizer._buckets),
        }
    results["bytes"] = peak_bytes(size, is_traced=rank == 0)
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.barrier()
    os._exit(0)


def peak_bytes(num_processes: int, is_traced: bool = True) -> tuple[int, int]:
    """Measure bytes of the parameters, and peak bytes in a step (0: not traced): many layers, few samples, buckets of a layer
    each."""
    folding.BUCKET, tracer = 2**19, contextlib.nullcontext()
    if is_traced:
        from stepplan.trace import Tracer  # here: it imports transformers

        tracer = Tracer()
    with tracer:
        network = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(16)])
        optimizer = AccumulatingAdamW(network.parameters(), 1e-3, gradient_accumulation_steps=2)
        if num_processes > 1:
            optimizer.distribute(network)
        for _ in range(2):
            for _ in range(2):
                network(torch.ones(1, 256)).sum().backward()
            optimizer.step()
            peak = tracer.peak() if is_traced else 0
    return sum(parameter.nbytes for parameter in network.parameters()), peak
