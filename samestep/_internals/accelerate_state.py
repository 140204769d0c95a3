"""The count of micro-batches, and what Accelerate decides by itself."""

import functools
from collections.abc import Callable

import accelerate.optimizer
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, PartialState
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, is_lomo_available
from torch import nn


def begin_step(accelerator: Accelerator, num_done: int = 0) -> None:
    """Let the next `accelerator.accumulate` be the first of a step, or that after the first `num_done`.

    accelerate 1.15, `Accelerator.step`: the count of micro-batches, of which Accelerate uses only the remainder by k. It must
    not carry over from a step with another k, and nothing documented sets it back.
    """
    accelerator.step = num_done


def prepared_schedulers(accelerator: Accelerator) -> list[AcceleratedScheduler]:
    """Return the schedulers that `accelerator.prepare` has wrapped (accelerate 1.15, `_schedulers`)."""
    return accelerator._schedulers


def prepared_models(accelerator: Accelerator) -> list[nn.Module]:
    """Return the models that `accelerator.prepare` has wrapped (accelerate 1.15, `_models`)."""
    return accelerator._models


def find_original_forwards(model: nn.Module) -> dict[nn.Module, Callable]:
    """Return the forward that each prepared module had before autocast was put around it (accelerate 1.15, `prepare_model`)."""
    return {
        module: module._original_forward
        for module in model.modules()
        if "_original_forward" in vars(module) and "forward" in vars(module)
    }


def search_for_lomo_once() -> None:
    """Remember whether the package of the optimizer LOMO is there.

    accelerate 1.15: `AcceleratedOptimizer.step` looks through all of sys.path for it, twice in every micro-batch: 0.3 ms.
    """
    accelerate.optimizer.is_lomo_available = functools.cache(is_lomo_available)


def shard_on_cpus(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Let `prepare` shard weights over processes on CPUs.

    accelerate 1.15: `AcceleratorState` sets this for every kind of device but CPUs, where it would quietly take
    DistributedDataParallel instead. `PartialState._shared_state` is what all states of a process share.
    """
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin


class Groups(ParallelismConfig):
    """Groups of processes that divide the weights, as the launch file's parallelism_config has them, on any device.

    accelerate 1.15, `ParallelismConfig._validate_accelerator`: refuses processes on CPUs. What it asks of others,
    `launch.create_accelerator` has asked before.
    """

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        pass
