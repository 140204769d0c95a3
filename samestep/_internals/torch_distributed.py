"""DistributedDataParallel's reducer, the store that connects the processes, and how restarted ones meet."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel


def total(numbers: torch.Tensor) -> torch.Tensor:
    """Begin to add up the tensors of all processes; the sum is waited for where it is used first.

    torch 2.13, `torch.distributed._functional_collectives.all_reduce`, which torch compiles its collectives to. The documented
    `all_reduce(async_op=True)` returns a handle, which has to be waited for by hand.
    """
    return _functional_collectives.all_reduce(numbers, "sum", dist.group.WORLD)


def default_store() -> dist.Store:
    """Return the store by which the processes found each other, the one way for them to speak while a collective is under way.

    torch 2.13, `_get_default_store`: no documented function returns it.
    """
    return dist.distributed_c10d._get_default_store()


def num_collectives(model: DistributedDataParallel) -> int:
    """Count the collectives that the process group of `model` has begun on this process.

    torch 2.13, `_get_sequence_number_for_group`: after a failed backward it tells how many buckets were reduced.
    """
    return model.process_group._get_sequence_number_for_group()


def rebuild_buckets(model: DistributedDataParallel) -> None:
    """Put the buckets of gradients in their final order now, which is a collective after the first backward.

    torch 2.13, `Reducer._rebuild_buckets`: otherwise the next forward does it. That forward may fail on one process before it
    gets there, while the others wait.
    """
    model.reducer._rebuild_buckets()


def reduce_zeros(model: DistributedDataParallel, num_reduced: int) -> None:
    """Take part in the reductions of a backward that failed here, after the first `num_reduced` ones, with zeros.

    torch 2.13, `Reducer._get_zeros_like_grad_buckets` and `_run_comm_hook`, which DistributedDataParallel's `join` uses for
    processes that have run out of samples: the other processes wait for as many reductions as there are buckets.
    """
    buckets = model.reducer._get_zeros_like_grad_buckets()[num_reduced:]
    for work in [model.reducer._run_comm_hook(bucket) for bucket in buckets]:
        work.wait()


def begin_again(model: DistributedDataParallel, **settings: Any) -> None:
    """Give `model` a new reducer, as if it had just been made from its module; whoever holds `model` keeps it.

    torch 2.13, `__init__` on an object that exists: a backward that was broken off leaves the reducer unusable, and nothing
    documented resets it.

    Args:
        settings: arguments of DistributedDataParallel, except its devices, which stay.
    """
    devices = {"device_ids": model.device_ids, "output_device": model.output_device}
    DistributedDataParallel.__init__(model, model.module, **devices, **settings)


def let_gloo_add_bf16() -> None:
    """Let DistributedDataParallel take torch's bf16_compress_hook on CPUs, too.

    torch 2.13, `_check_comm_hook`: it refuses the hook by its name where there is no CUDA with NCCL; gloo adds bf16 up as well.
    """
    bf16_compress_hook.__name__ = "bf16_compress_hook_on_any_device"


def release(model: nn.Module) -> None:
    """Take the reducer and the process group from a DistributedDataParallel that somebody may still hold.

    torch 2.13: a reducer that holds the last reference to gloo waits, when it is deleted after the process group's end, for
    gloo's threads, without giving them Python's lock, which they may wait for.
    """
    if isinstance(model, DistributedDataParallel):
        for name in ("reducer", "logger", "process_group"):
            delattr(model, name)


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give parameters on the device `meta` memory on another one, without numbers; all others stay as they are.

    torch 2.13, `Module._apply`, which FSDP2 listens to: the documented `to_empty` takes the numbers of the others away.
    """
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)


def register_rendezvous(generation: str) -> str:
    """Return an `init_method` by which restarted workers meet (`--max_restarts`), with store keys of their own.

    torch 2.13: with `env://` they find the addresses of the dead workers in the store that their agent keeps, and fail to
    connect.
    `rendezvous` and `register_rendezvous_handler` are not in its documentation.

    Args:
        generation: TORCHELASTIC_RESTART_COUNT, how many times the workers were restarted.
    """

    def meet(url: str, timeout: timedelta, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        yield dist.PrefixStore(f"generation-{generation}", store), rank, size

    scheme = f"generation{generation}"
    with contextlib.suppress(RuntimeError):  # it is registered already
        dist.register_rendezvous_handler(scheme, meet)
    return f"{scheme}://"
