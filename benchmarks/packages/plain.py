"""Runs a program of this folder plainly, and saves its gradients: python plain.py FILE PROGRAM ARGS

Nothing of the audit is used. The rate is 0, so that all steps are taken at the same weights. Saved are, of each step, the whole
gradient that the optimizer gets, what it was after each backward before it, how many samples each batch had, and what causal
models were told of the number of their targets: (num_items_in_batch, labels that are predicted) of each call.
"""

import os
import runpy
import sys
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data._utils.fetch import _MapDatasetFetcher

os.environ["RATE"] = "0"
file, program, *argv = sys.argv[1:]
sys.argv = [program, *argv]
sys.path[0] = str(Path(program).resolve().parent)
steps, backward_gradients, batches, parameters, counts = [], [], [], [], []
datasets: list[int] = []
call = torch.nn.Module.__call__
backward, fetch = torch.autograd.backward, _MapDatasetFetcher.fetch
depth = 0


def flatten_gradient() -> torch.Tensor:
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).detach().double().flatten() for p in parameters]
    )


def note_backward(*args, **kwargs) -> None:
    global depth
    depth += 1
    try:
        backward(*args, **kwargs)
    finally:
        depth -= 1
    if parameters and not depth:
        backward_gradients.append(flatten_gradient())


def note_fetch(fetcher, index):
    datasets.append(id(fetcher.dataset))
    if datasets[-1] == datasets[0]:  # not an evaluation's
        batches.append(list(index))
    return fetch(fetcher, index)


def note_call(module, *args, **kwargs):
    labels, num_items = kwargs.get("labels"), kwargs.get("num_items_in_batch")
    if num_items is not None and labels is not None and labels.ndim == 2 and torch.is_grad_enabled():
        counts.append((float(num_items), int((labels[:, 1:] != -100).sum())))
    return call(module, *args, **kwargs)


def begin_step(optimizer, args, kwargs) -> None:
    if not parameters:
        parameters.extend(p for group in optimizer.param_groups for p in group["params"])
    if not (args or kwargs.get("closure")):
        note_step()


def end_step(optimizer, args, kwargs) -> None:
    if args or kwargs.get("closure"):  # it has computed the gradient (Lightning)
        note_step()


def note_step() -> None:
    steps.append({"gradient": flatten_gradient(), "after": list(backward_gradients), "counts": list(counts)})
    backward_gradients.clear()
    counts.clear()


torch.autograd.backward, _MapDatasetFetcher.fetch, torch.nn.Module.__call__ = note_backward, note_fetch, note_call
register_optimizer_step_pre_hook(begin_step)
register_optimizer_step_post_hook(end_step)
runpy.run_path(program, run_name="__main__")
rank = int(os.environ.get("RANK", "0"))
torch.save({"steps": steps, "batches": batches}, f"{file}-{rank}.pt")
sys.stdout.flush()
os._exit(0)
