"""Holds every use of private parts of torch and datasets: the audit needs them to look into programs of others.

The other modules use documented functions only, though some are replaced while a program is recorded (see `record.Recorder`).
tests/test_internals.py fails where an upgrade changes a part that is used here. Looked up in torch 2.13 and datasets 5.2.
"""

import gc
import sys
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack  # the one way to ask
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # of any number of dimensions, synchronised or not
from torch.nn.modules.dropout import _DropoutNd as Dropout  # of any number of dimensions
from torch.utils._pytree import tree_leaves, tree_map  # the one way to them
from torch.utils.data import _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = ["FETCHERS", "GRADIENT", "BatchNorm", "Dropout", "LoaderIterator", "tree_leaves", "tree_map"]

FETCHERS = (_utils.fetch._MapDatasetFetcher, _utils.fetch._IterableDatasetFetcher)
"""Classes whose `fetch` makes each batch in the main process (torch 2.13). The `_next_index` of a `LoaderIterator` says which
samples it takes, its `__next__` returns them."""

MAX_BETWEEN = 8
"""Nodes between a loss and the slice of its logits."""


def get_dataset(iterator: LoaderIterator) -> Any:
    """Return the dataset that a loader's iterator draws from (torch 2.13, `_dataset`)."""
    return iterator._dataset


def count_returned(iterator: LoaderIterator) -> int:
    """Count the batches that a loader's iterator has returned in its epoch (torch 2.13, `_num_yielded`)."""
    return iterator._num_yielded


def find_table_rows(dataset: Any, numbers: list[int]) -> list[int]:
    """Return the rows of its table that a `datasets.Dataset` means by these numbers, after `shuffle`, `select` or `shard`.

    datasets 5.2, `_indices`. For any other dataset, and for a table in its first order, the rows are the numbers themselves.
    """
    indices = getattr(dataset, "_indices", None)
    if not hasattr(indices, "column"):
        return numbers
    return [indices.column(0)[number].as_py() for number in numbers]


def find_targets(node: Any) -> tuple[torch.Tensor, torch.Tensor, int | None] | None:
    """Find the targets that a node of a graph keeps for its backward: int64, and which of them count nothing, bool.

    The third is the first place of a sample that the logits were cut to; None: no cut is found.

    Those of `cross_entropy` and `nll_loss`, and of a `gather` of one number in each place of the last dimension, in which
    programs pick log-probabilities, of 0 where nothing counts (torch 2.13, `_saved_target`, `_saved_ignore_index`,
    `_saved_index`). None: there are none, or they are freed or changed by now.
    """
    name = node.name()
    try:
        if name.startswith("NllLoss"):
            targets = node._saved_target
            return targets, targets == node._saved_ignore_index, _find_first_place(node)
        if name.startswith("GatherBackward"):
            targets = node._saved_index
            is_one = targets.ndim > 0 and targets.shape[-1] == 1
            return (targets, targets <= 0, _find_first_place(node)) if is_one else None
    except RuntimeError:  # torch's words for both
        return None
    return None


def _find_first_place(node: Any) -> int | None:
    """Find where the nearest slice of the second dimension, [samples, length, ...], begins that a node was computed of.

    torch 2.13, `_saved_dim`, `_saved_start`; between them lie views, copies and the logarithm of the softmax.
    """
    for _ in range(MAX_BETWEEN):
        node = node.next_functions[0][0] if node.next_functions else None
        if node is None:
            return None
        if node.name().startswith("SliceBackward") and node._saved_dim == 1:
            return node._saved_start
    return None


def has_hooks(parameter: torch.Tensor) -> bool:
    """Tell whether a parameter's gradient has hooks (torch 2.13, `_backward_hooks`, `_post_accumulate_grad_hooks`)."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def is_flat(parameter: torch.Tensor) -> bool:
    """Tell whether a parameter is many in a row, as the first kind of FSDP makes them (torch 2.13, `_is_flat_param`)."""
    return getattr(parameter, "_is_flat_param", False)


def put_last_hook_first(parameter: torch.Tensor) -> None:
    """Move the hook that was registered last on a parameter's gradient in front of all others, which may change the gradient.

    torch 2.13, `_backward_hooks`, a dictionary in the order of the calls; `register_hook` has no `prepend`, as modules' has.
    """
    hooks = parameter._backward_hooks
    last, others = hooks.popitem(), list(hooks.items())
    hooks.clear()
    hooks.update([last, *others])


def find_objects(kind: type) -> list[Any]:
    """Find all objects of a class that live, frozen ones (`gc.freeze`) aside; no property of theirs is asked."""
    return [value for value in gc.get_objects() if issubclass(type(value), kind)]


def count_changes(tensor: torch.Tensor) -> int:
    """Count the changes of a tensor in place (torch 2.13, `_version`); changes through `.data` are not counted."""
    return tensor._version


def get_autocast_dtype(autocast: torch.autocast) -> torch.dtype | None:
    """Return the dtype in which an autocast computes (torch 2.13, `_enabled`); None if it is switched off."""
    return autocast.fast_dtype if autocast._enabled else None


def switch_off(autocast: torch.autocast) -> None:
    """Switch an autocast off before it is entered (torch 2.13, `_enabled`)."""
    autocast._enabled = False


GRADIENT = torch._C.TensorBase.grad
"""Descriptor of `.grad` of all tensors; `torch.Tensor`, which is a class of Python, can have another one (torch 2.13)."""


def is_transformed() -> bool:
    """Tell whether a transform of torch.func (grad, vmap, jvp) computes now (torch 2.13, `torch._C._functorch`)."""
    return peek_interpreter_stack() is not None


TENSOR_FILES = (torch._tensor.__file__, torch._tensor_str.__file__)
"""Files of torch 2.13 whose methods of tensors call others: `float(tensor)`, `print(tensor)`."""


def find_reader(own: set[str]) -> str:
    """Return the file of the first function above the caller that is in none of these files (CPython, `sys._getframe`)."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename in own or frame.f_code.co_name == "replacement"):
        frame = frame.f_back
    return frame.f_code.co_filename


def find_caller(depth: int) -> str:
    """Return the file of the function that is `depth` calls above the caller (CPython, `sys._getframe`)."""
    return sys._getframe(depth + 1).f_code.co_filename
