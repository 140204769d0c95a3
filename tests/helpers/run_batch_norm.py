"""Networks with batch normalisation, a step of samples, its cut; one of several processes over gloo, which a server forks."""

import copy
import itertools
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samestep.contrib.whole_step import WholeStep, deviation
from samestep.step import batch_norm

LAYER_SIZES = {2: [[5, 2], [0, 7]], 3: [[4, 0, 3], [1, 5, 1]]}
"""Samples of each process in two micro-batches."""
MICRO_BATCHES = {1: [[5, 3, 1]], 2: [[5, 3], [1]], 3: [[5, 3], [], [1]]}
"""Sizes of each process's micro-batches of a step."""
EVEN_MICRO_BATCHES = {2: [[5, 0], [3, 1]], 3: [[5, 2], [0, 0], [1, 1]]}
"""As many micro-batches on each process."""
CELLS = [3, 1, 2, 0, 2, 1]
"""Sizes of a step's micro-batches, dealt to the processes in turn."""
ONE_MICRO_BATCH = {2: [[5], [4]], 3: [[5], [0], [4]]}


def block(in_channels: int, out_channels: int) -> list[nn.Module]:
    return [nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False), nn.BatchNorm2d(out_channels), nn.ReLU()]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*block(3, 4))
        self.body = nn.Sequential(*block(4, 6), nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6))
        self.shortcut = nn.Sequential(nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6))
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = self.stem(x)
        return self.head(F.relu(self.body(x) + self.shortcut(x)).mean((2, 3)))


def build(kind: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Build a network `plain` or `residual` of four normalisations, whose weights and biases are not their initial ones."""
    torch.manual_seed(0)
    layers = [*block(3, 4), *block(4, 6), *block(6, 4), *block(4, 6), nn.Flatten(), nn.Linear(6 * 6 * 6, 5)]
    model = nn.Sequential(*layers) if kind == "plain" else Residual()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1, 0.3)
            nn.init.normal_(module.bias, 0, 0.3)
    return model.to(dtype)


def samples(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Make nine images, each brighter and with more contrast than the one before, and their labels."""
    torch.manual_seed(1)
    levels = torch.linspace(-1, 1, 9).view(9, 1, 1, 1)
    return ((torch.randn(9, 3, 6, 6) * (1 + levels / 2) + levels).to(dtype), torch.arange(9) % 5)


def cut(sizes: list[list[int]], process: int) -> list[slice]:
    """Cut the samples: this process's micro-batches, as slices."""
    ends = itertools.accumulate(itertools.chain(*sizes), initial=0)
    micro_batches = [slice(*pair) for pair in itertools.pairwise(ends)]
    first = sum(map(len, sizes[:process]))
    return micro_batches[first : first + len(sizes[process])]


def make_loss(model: nn.Module, dtype: torch.dtype = torch.float64):
    """Make the function of a micro-batch's share of the step's loss."""
    images, labels = samples(dtype)
    return lambda micro_batch: F.cross_entropy(model(images[micro_batch]), labels[micro_batch], reduction="sum") / 9


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def layer_and_maps() -> tuple[nn.BatchNorm2d, list[torch.Tensor]]:
    """Make a layer and seven feature maps for each of two micro-batches, far from mean 0."""
    torch.manual_seed(2)
    layer = nn.BatchNorm2d(3).double()
    nn.init.normal_(layer.weight), nn.init.normal_(layer.bias)
    return layer, [torch.randn(7, 3, 4, 5, dtype=torch.float64) * 3 + 20 for _ in range(2)]


def micro_steps(layer: nn.Module, maps: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run forward and backward of each of the maps; return outputs, gradients and running statistics."""
    outputs, inputs = [], []
    for x in maps:
        x = x.clone().requires_grad_()
        y = layer(x)
        y.sin().sum().backward()
        outputs.append(y.detach()), inputs.append(x.grad)
    shares = {"weight.grad": layer.weight.grad, "bias.grad": layer.bias.grad}
    return {"y": outputs, "dx": inputs, **shares, **layer.state_dict()}


def one_layer(rank: int, size: int) -> dict:
    layer, maps = layer_and_maps()
    batch_norm.synchronize(nn.Sequential(layer))
    parts = [x.split(sizes)[rank] for x, sizes in zip(maps, LAYER_SIZES[size], strict=True)]
    assert layer.group not in (None, dist.group.WORLD), "its own, which DDP does not use"
    return micro_steps(layer, parts)


def whole_step(kind: str, rank: int, size: int) -> dict:
    model = build(kind)
    batch_norm.synchronize(model)
    micro_batches, loss, collectives = cut(MICRO_BATCHES[size], rank), make_loss(model), []
    whole, all_reduce = WholeStep(model), dist.all_reduce
    dist.all_reduce = lambda tensor, *rest, **kwargs: (collectives.append(0), all_reduce(tensor, *rest, **kwargs))[1]
    whole.prepare(micro_batches, loss)
    dist.all_reduce = all_reduce
    for micro_batch in micro_batches:
        (loss(micro_batch) + whole.correction()).backward()
    whole.finish()
    gradient = torch.zeros(sum(p.numel() for p in model.parameters())).double()
    if micro_batches:
        gradient = gradients(model)
    dist.all_reduce(gradient)
    return {"gradient": gradient, "collectives": len(collectives), "passes": passes(whole), "state": model.state_dict()}


def passes(whole: WholeStep) -> list[int]:
    return [whole.num_forward_passes, whole.num_adjoint_passes]


def canonical_step(kind: str, dtype: torch.dtype, rank: int, size: int) -> dict:
    """Take a step whose results do not depend on the processes; every second process goes through its cells backwards.

    Returns:
        gradients: number of each of this process's cells -> gradient [parameters]; collectives: during these cells.
    """
    model, collectives, all_reduce = build(kind, dtype), [], dist.all_reduce
    batch_norm.synchronize(model)
    numbers = list(range(rank, len(CELLS), size))[:: -1 if rank % 2 else 1]
    numbers += [None] * (-(-len(CELLS) // size) - len(numbers))
    cells = [slice(0, 0) if number is None else cut([CELLS], 0)[number] for number in numbers]
    plain = make_loss(model, dtype)

    def loss(cell):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32 and kind == "residual"):
            return plain(cell)

    whole, parameters = WholeStep(model, is_canonical=True), list(model.parameters())
    whole.prepare(cells, loss, numbers=numbers, num_cells=len(CELLS))
    dist.all_reduce = lambda *arguments, **kwargs: collectives.append(0)
    parts = {
        number: torch.cat([part.flatten() for part in torch.autograd.grad(loss(cell) + whole.correction(), parameters)])
        for number, cell in zip(numbers, cells, strict=True)
    }
    dist.all_reduce = all_reduce
    whole.finish()
    parts.pop(None, None)
    return {"gradients": parts, "collectives": len(collectives), "passes": passes(whole), "state": model.state_dict()}


def ddp_step(rank: int, size: int) -> dict:
    """Take a step under DDP, with k = 2 on one process and 1 on the others."""
    model = build("residual")
    batch_norm.synchronize(model)
    parallel = DistributedDataParallel(model, broadcast_buffers=False)
    micro_batches, (images, labels) = cut({2: [[3, 2], [4]], 3: [[3, 2], [3], [1]]}[size], rank), samples()
    whole = WholeStep(model)
    whole.prepare(micro_batches, make_loss(model))
    for place, micro_batch in enumerate(micro_batches):
        parallel.require_backward_grad_sync = place == len(micro_batches) - 1
        loss = F.cross_entropy(parallel(images[micro_batch]), labels[micro_batch], reduction="sum") / 9
        ((loss + whole.correction()) * size).backward()
    whole.finish()
    return {"gradient": gradients(model)}


def deviations(rank: int, size: int) -> dict:
    model = build("residual")
    batch_norm.synchronize(model)
    state, loss = copy.deepcopy(model.state_dict()), make_loss(model)
    values = [deviation(model, cut(sizes[size], rank), loss) for sizes in (EVEN_MICRO_BATCHES, ONE_MICRO_BATCH)]
    return {"deviations": values, "is_untouched": same_state(model, state)}


def same_state(model: nn.Module, state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


CANONICAL = [
    ("plain", torch.float64),
    ("plain", torch.float32),
    ("residual", torch.float64),
    ("residual", torch.float32),
]
"""Networks and types of canonical steps; the last one computes in bfloat16."""


def failures(rank: int, size: int) -> dict:
    """Let the last process fail in a forward pass, in an adjoint pass; numbers are not finite on the first one only."""
    model = build("plain")
    batch_norm.synchronize(model)
    micro_batches, loss, errors = [slice(3 * rank, 3 * rank + 3)], make_loss(model), []
    whole = WholeStep(model)
    for fails_with_gradient in (False, True):

        def failing(micro_batch, needs_gradient=fails_with_gradient):
            if rank == size - 1 and torch.is_grad_enabled() == needs_gradient:
                raise MemoryError("none left")
            return loss(micro_batch)

        for options in ({}, {"numbers": [rank], "num_cells": size}):
            whole.is_canonical = bool(options)
            try:
                whole.prepare(micro_batches, failing, **options)
            except Exception as error:
                errors.append(type(error).__name__)
    whole.is_canonical = False
    whole.prepare(micro_batches, lambda micro_batch: loss(micro_batch) * (torch.inf if rank == 0 else 1))
    return {"errors": errors, "passes": passes(whole)}


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.save(
        {
            "one_layer": one_layer(rank, size),
            "plain": whole_step("plain", rank, size),
            "residual": whole_step("residual", rank, size),
            "canonical": [canonical_step(*case, rank, size) for case in CANONICAL],
            "under_ddp": ddp_step(rank, size),
            "deviations": deviations(rank, size),
            "failures": failures(rank, size),
        },
        Path(folder) / f"{rank}.pt",
    )
    dist.barrier()
    os._exit(0)
