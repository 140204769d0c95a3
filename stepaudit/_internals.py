"""All that is private of torch and datasets: what the audit has to look at in programs that are not its own.

Elsewhere it uses what they document, though some of that is replaced while a program is recorded (see `record.Recorder`).
tests/test_internals.py fails where an upgrade changes what is here; it was looked up in torch 2.13 and datasets 5.2.
"""

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # of any number of dimensions, synchronised or not
from torch.nn.modules.dropout import _DropoutNd as Dropout  # of any number of dimensions
from torch.utils._pytree import tree_leaves, tree_map  # the one way to them
from torch.utils.data import _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = ["FETCHERS", "BatchNorm", "Dropout", "LoaderIterator", "tree_leaves", "tree_map"]

FETCHERS = (_utils.fetch._MapDatasetFetcher, _utils.fetch._IterableDatasetFetcher)
"""torch 2.13: by whose `fetch` each batch comes in the main process. A `LoaderIterator` says by `_next_index` which samples it
takes, and returns them by `__next__`."""


def loaded(iterator: LoaderIterator) -> Any:
    """Return the dataset that a loader's iterator draws from (torch 2.13, `_dataset`)."""
    return iterator._dataset


def rows_chosen(dataset: Any, numbers: list[int]) -> list[int]:
    """Return which rows of its table a `datasets.Dataset` means by these numbers, after `shuffle`, `select` or `shard`.

    datasets 5.2, `_indices`. Of any other dataset, and where the numbers are those of the table, the numbers.
    """
    indices = getattr(dataset, "_indices", None)
    if not hasattr(indices, "column"):
        return numbers
    return [indices.column(0)[number].as_py() for number in numbers]


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether a program has hooks on a parameter's gradient (torch 2.13, `_backward_hooks`, `_post_accumulate_grad_hooks`)."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def put_last_hook_first(parameter: torch.Tensor) -> None:
    """Call the hook that was registered last on a parameter's gradient before all others, which may change the gradient.

    torch 2.13, `_backward_hooks`, a dictionary in the order of the calls; `register_hook` has no `prepend`, as modules' has.
    """
    hooks = parameter._backward_hooks
    last, others = hooks.popitem(), list(hooks.items())
    hooks.clear()
    hooks.update([last, *others])


def num_changes(tensor: torch.Tensor) -> int:
    """Count how often a tensor was changed in place (torch 2.13, `_version`); not through `.data`."""
    return tensor._version
