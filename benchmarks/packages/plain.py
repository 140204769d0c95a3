"""Runs a program plainly, and saves its gradients: python plain.py FOLDER PROGRAM ARGS

Nothing of the audit is used. The rate of every optimizer is set to 0, so that all steps are taken at the same weights. Saved
are, of each step, the whole gradient that the optimizer gets, what it was after each backward before it, how many samples each
batch had, and what causal models were told of their targets: (num_items_in_batch, labels that are predicted) of each call.
"""

import os
import runpy
import sys
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data._utils.fetch import _MapDatasetFetcher

CAUSAL = ("ForCausalLM", "LMHeadModel")
"""How the classes of models are named that shift the labels themselves, and so do not predict the first one of a row."""


class Notes:
    """Notes the steps of a program.

    Attributes:
        steps: of each, its gradient, and what is said above.
        batches: indices of the samples of each batch.
    """

    def __init__(self):
        self.steps, self.batches = [], []
        self.parameters, self.backward_gradients, self.counts, self.datasets = [], [], [], []
        self.depth = 0
        self.backward, self.fetch = torch.autograd.backward, _MapDatasetFetcher.fetch
        self.call = torch.nn.Module.__call__

    def start(self) -> None:
        """Replace what is noted of torch; it is never put back."""
        torch.autograd.backward = self.note_backward
        _MapDatasetFetcher.fetch = lambda fetcher, index: self.note_fetch(fetcher, index)
        torch.nn.Module.__call__ = lambda module, *args, **kwargs: self.note_call(module, args, kwargs)
        register_optimizer_step_pre_hook(self.begin_step)
        register_optimizer_step_post_hook(self.end_step)

    def flatten_gradient(self) -> torch.Tensor:
        return torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).detach().double().flatten() for p in self.parameters]
        )

    def note_backward(self, *args, **kwargs) -> None:
        self.depth += 1
        try:
            self.backward(*args, **kwargs)
        finally:
            self.depth -= 1
        if self.parameters and not self.depth:
            self.backward_gradients.append(self.flatten_gradient())

    def note_fetch(self, fetcher, index):
        self.datasets.append(id(fetcher.dataset))
        if self.datasets[-1] == self.datasets[0]:  # not an evaluation's
            self.batches.append(list(index))
        return self.fetch(fetcher, index)

    def note_call(self, module, args, kwargs):
        labels, num_items = kwargs.get("labels"), kwargs.get("num_items_in_batch")
        is_causal = type(module).__name__.endswith(CAUSAL) and torch.is_grad_enabled()
        if is_causal and num_items is not None and labels is not None:
            self.counts.append((float(num_items), int((labels[:, 1:] != -100).sum())))
        return self.call(module, *args, **kwargs)

    def begin_step(self, optimizer, args, kwargs) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0
        if not self.parameters:
            self.parameters.extend(p for group in optimizer.param_groups for p in group["params"])
        if not (args or kwargs.get("closure")):
            self.note_step()

    def end_step(self, optimizer, args, kwargs) -> None:
        if args or kwargs.get("closure"):  # it has computed the gradient (Lightning)
            self.note_step()

    def note_step(self) -> None:
        step = {
            "gradient": self.flatten_gradient(),
            "after": list(self.backward_gradients),
            "counts": list(self.counts),
        }
        self.steps.append(step)
        self.backward_gradients.clear()
        self.counts.clear()


def main(folder: str, program: str, *argv: str) -> None:
    """Run a program, and end the process; the notes are saved as saved-RANK.pt."""
    sys.argv = [program, *argv]
    sys.path[0] = str(Path(program).resolve().parent)
    notes = Notes()
    notes.start()
    runpy.run_path(program, run_name="__main__")
    rank = int(os.environ.get("RANK", "0"))
    torch.save({"steps": notes.steps, "batches": notes.batches}, f"{folder}/saved-{rank}.pt")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
