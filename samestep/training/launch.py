"""Makes the `Accelerator`, and refuses launches that Accelerate would quietly turn into others."""

import gc
import os
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    get_int_from_env,
    parse_flag_from_env,
)
from torch import nn

from samestep._internals.accelerate_state import Groups, search_for_lomo_once, shard_on_cpus
from samestep._internals.libc import stop_malloc_returning_memory
from samestep._internals.torch_distributed import let_gloo_add_bf16, register_rendezvous
from samestep.errors import UsageError
from samestep.recipe.exclusions import find_refusal
from samestep.recipe.recipe import Recipe
from samestep.recipe.run_settings import RunSettings
from samestep.step.batch_norm import BatchNorm
from samestep.training import sharding

# How torchrun (so also `accelerate launch`) and three kinds of mpirun count and number the processes.
SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
ONEDNN_KERNELS = "8192"
"""Capacity of oneDNN's cache of kernels. oneDNN generates a kernel, in 0.7 ms, for every size of a matmul in bf16; its default,
1024, is too few for micro-batches of all sizes."""

UNSUPPORTED_FEATURES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed scales the loss and accumulates by its own rules",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM scales the loss and accumulates by its own rules",
}
PARALLELISM = "PARALLELISM_CONFIG_"
"""Begin of the variables in which `accelerate launch` passes parallelism_config on."""


def create_accelerator(
    mixed_precision: str | None = None,
    ddp_timeout: float = 1800,
    fsdp_gather: str = "bf16",
    is_reproducible: bool = False,
    fault_tolerance: str = "none",
    reduce_dtype: str = "own",
    kind: type[Accelerator] = Accelerator,
    recipe: Recipe | None = None,
    settings: RunSettings | None = None,
    **kwargs,
) -> Accelerator:
    """Make the `Accelerator` of a script; k is 1 until the script sets gradient_accumulation_steps from its layout.

    One process takes the GPU if there is one. The launch asks for the CPU by ACCELERATE_USE_CPU or by hiding the GPUs
    (`gpu_ids: "-1,-1"` in the launch file, or CUDA_VISIBLE_DEVICES); several processes then talk over gloo. Several
    processes that find no GPU without having asked for the CPU are an error.

    Args:
        mixed_precision: no, fp16 or bf16; None: as the launch says.
        ddp_timeout: seconds that a process waits for another in a collective.
        fsdp_gather: type in which sharded weights are gathered under mixed precision bf16: bf16 or fp32. Without, their own.
        is_reproducible: whether only kernels are used whose result is the same to the bit each time: on a CPU by one thread.
        fault_tolerance: `step`: the launch is one of several replicas; `restart`: the launcher starts workers
            again, on the machines that are there; `none`.
        reduce_dtype: type in which DistributedDataParallel sends gradients: bf16, fp16, or own.
        kind: class of the accelerator.
        recipe, settings: what is trained, and how, for rules about the launch; None: a loop without them.
        kwargs: further arguments of `Accelerator`, such as log_with and project_dir.

    Raises:
        UsageError: a launch that would not be what it says, or whose steps would not be the recipe's.
    """
    if not gc.isenabled():  # the program turned the collector off while it imported modules
        gc.freeze()  # modules stay: the collector need not look at them again, which takes 0.4 s each time
        gc.enable()
    problems = _find_environment_problems()
    keeps_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if fault_tolerance == "restart" and keeps_store and int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        problems.append(
            "fault_tolerance is restart, but torchrun keeps one store for all generations of workers, so that new ones wait "
            "for the addresses of dead ones. Start it with --rdzv_backend c10d, and with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment"
        )
    shards = parse_flag_from_env("ACCELERATE_USE_FSDP")
    if refusal := find_refusal(recipe, settings, is_sharded=shards):
        problems.append(str(refusal))
    if problems:
        raise UsageError(problems)
    if is_reproducible:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA begins
    plugin = sharding.make_plugin()
    search_for_lomo_once()
    # Accelerate 1.15 knows no other name for `broadcast_buffers`; torch 2.13 warns in every process that a new name will come.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
    generation = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    has_old_keys = generation != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "False"
    accelerator = kind(
        # Sharded gradients are reduced in every micro-batch: if they waited for the last, they would be whole on every process.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_each_batch=plugin is not None),
        fsdp_plugin=plugin,
        parallelism_config=_make_groups(),
        mixed_precision=mixed_precision,
        cpu=_gpus_are_hidden(),
        kwargs_handlers=[
            DistributedDataParallelKwargs(
                gradient_as_bucket_view=True,
                broadcast_buffers=False,
                comm_hook=DDPCommunicationHookType(reduce_dtype.replace("own", "no")),
            ),
            InitProcessGroupKwargs(
                init_method=register_rendezvous(generation) if has_old_keys else None,
                timeout=timedelta(seconds=ddp_timeout),
            ),
        ],
        **kwargs,
    )
    if problems := find_accelerator_problems(accelerator, recipe, settings):
        raise UsageError(problems)
    if accelerator.device.type == "cpu":
        let_gloo_add_bf16()
        stop_malloc_returning_memory()
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", ONEDNN_KERNELS)  # read when the first kernel is made
    if is_reproducible:
        if accelerator.device.type == "cpu":
            torch.set_num_threads(1)
        else:
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
    if plugin is not None and accelerator.mixed_precision == "bf16" and fsdp_gather == "bf16":
        plugin.mixed_precision_policy = sharding.HALF_PRECISION
    if plugin is not None and accelerator.device.type == "cpu" and accelerator.num_processes > 1:
        shard_on_cpus(accelerator, plugin)
    return accelerator


def prepare(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple:
    """Call `accelerator.prepare`, for weights that are sharded by way of `sharding.prepare`.

    Args:
        model: sharded by the classes in its `_no_split_modules`, if the launch file shards.
    """
    if is_sharded(accelerator):
        return sharding.prepare(accelerator, model, optimizer)
    return accelerator.prepare(model, optimizer)


def prepare_unwrapped(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple:
    """Prepare a model without DistributedDataParallel, whose place something else takes; all get the weights of process 0."""
    model = accelerator.prepare_model(model, evaluation_mode=True)
    for tensor in [*model.parameters(), *model.buffers()] if accelerator.num_processes > 1 else []:
        dist.broadcast(tensor.detach(), 0)
    return model, accelerator.prepare(optimizer)


def waits_in_forward(accelerator: Accelerator, model: nn.Module) -> bool:
    """Tell whether each forward needs all processes: for parts of the model, or for statistics of batch normalisation."""
    is_synchronized = any(isinstance(module, BatchNorm) and module.group is not None for module in model.modules())
    return is_sharded(accelerator) or is_synchronized


def is_sharded(accelerator: Accelerator) -> bool:
    """Tell whether processes hold parts of the model, so that each forward needs all processes."""
    return accelerator.distributed_type == DistributedType.FSDP


def count_copies(accelerator: Accelerator) -> int:
    """Count the groups of processes that each hold the whole model, divided within the group (HSDP); without groups 1."""
    return 1 if accelerator.torch_device_mesh is None else accelerator.parallelism_config.dp_replicate_size


def _gpus_are_hidden() -> bool:
    """Tell whether CUDA_VISIBLE_DEVICES hides every GPU.

    `accelerate launch` passes gpu_ids to all processes in this variable, but use_cpu only to a single process (in
    ACCELERATE_USE_CPU, which Accelerate reads itself).
    """
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in ("", "-1")


def _find_environment_problems() -> list[str]:
    problems = [
        f"{name} is set, but {why}: the step would not be the recipe's. Launch with distributed_type MULTI_GPU"
        for name, why in UNSUPPORTED_FEATURES.items()
        if parse_flag_from_env(name)
    ]
    if parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG"):
        problems += _find_parallelism_problems()
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        if (version := os.environ.get("FSDP_VERSION", "1")) != "2":
            problems.append(f"fsdp_version is {version}, but only FSDP2 is supported: set it to 2 in the launch file")
        if parse_flag_from_env("FSDP_CPU_RAM_EFFICIENT_LOADING"):
            problems.append(
                "fsdp_cpu_ram_efficient_loading is true, which unties tied weights (head and embedding): set it to "
                "false in the launch file"
            )
    if (value := os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")) is not None:
        problems.append(
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS is {value!r}, but k follows from the recipe and the hardware: "
            "remove gradient_accumulation_steps from the launch file, and unset the variable"
        )
    size, has_rank = get_int_from_env(SIZES, 1), get_int_from_env(RANKS, -1) >= 0
    if size > 1 and not has_rank:
        problems.append(
            f"the environment counts {size} processes, but this one has no RANK: start them by `accelerate launch`, or "
            "unset WORLD_SIZE to run one"
        )
    if size == 1 and not has_rank and {"ACCELERATE_USE_CPU", "MASTER_ADDR"} <= os.environ.keys():
        problems.append(
            "the launch file has num_processes above 1, but `accelerate launch` starts a single process for its "
            "distributed_type (MULTI_CPU, NO). On CPUs launch as accelerate_configs/2xcpu.yaml does, on GPUs with "
            "MULTI_GPU. For one process set num_processes: 1 and unset MASTER_ADDR"
        )
    return problems


def _find_parallelism_problems() -> list[str]:
    """List what is wrong with a launch file's parallelism_config, which may divide weights within groups of processes only."""
    for name in ("tp_size", "cp_size", "sp_size"):
        if (size := get_int_from_env([f"{PARALLELISM}{name.upper()}"], 1)) > 1:
            return [
                f"parallelism_config has {name} {size}, but then processes share samples, and the step would not be the "
                "recipe's: set it to 1"
            ]
    shards, size = get_int_from_env([f"{PARALLELISM}DP_SHARD_SIZE"], 1), get_int_from_env(SIZES, 1)
    if not parse_flag_from_env("ACCELERATE_USE_FSDP") or shards == 1:
        return [
            f"parallelism_config has dp_shard_size {shards}, but weights are not divided. Remove parallelism_config for copies "
            "on all processes (DDP), or set distributed_type FSDP and dp_shard_size to the devices of a machine (HSDP)"
        ]
    if size % shards:
        return [
            f"parallelism_config has dp_shard_size {shards}, but {size} processes cannot be divided into groups of {shards}: "
            "set dp_shard_size to the devices of a machine"
        ]
    return []


def _make_groups() -> Groups | None:
    """Make the groups of processes that each divide the weights (HSDP); None: all processes divide them, or none does.

    There are as many groups as there are processes for, whatever dp_replicate_size says, as machines come and go.
    """
    shards, size = get_int_from_env([f"{PARALLELISM}DP_SHARD_SIZE"], 1), get_int_from_env(SIZES, 1)
    is_used = parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG") and 1 < shards < size
    return Groups(dp_replicate_size=size // shards, dp_shard_size=shards) if is_used else None


def find_accelerator_problems(
    accelerator: Accelerator, recipe: Recipe | None, settings: RunSettings | None, cuda: Any = torch.cuda
) -> list[str]:
    """List what makes an accelerator another one than the launch says, or its steps others than the recipe's.

    Args:
        accelerator: as Accelerate made it.
        recipe, settings: as of `create_accelerator`.
        cuda: what knows the GPU.
    """
    problems, size, device = [], get_int_from_env(SIZES, 1), accelerator.device
    if size > 1 and accelerator.num_processes == 1:
        problems.append(
            f"{size} processes were launched, but each would train alone, on {device}. To train on GPUs, see that "
            "torch.cuda.is_available() and that LOCAL_RANK is set. To train on CPUs, launch with "
            "accelerate_configs/2xcpu.yaml or set ACCELERATE_USE_CPU=true"
        )
    if accelerator.mixed_precision == "fp16" and device.type == "cpu":
        problems.append("mixed_precision is fp16, but Accelerate would train in fp32 on a CPU: set it to no or bf16")
    if refusal := find_refusal(
        recipe,
        settings,
        mixed_precision=accelerator.mixed_precision,
        is_sharded=parse_flag_from_env("ACCELERATE_USE_FSDP"),
        num_processes=accelerator.num_processes,
        num_copies=count_copies(accelerator),
    ):
        problems.append(str(refusal))
    is_emulated = device.type == "cuda" and not cuda.is_bf16_supported(including_emulation=False)
    if accelerator.mixed_precision == "bf16" and is_emulated:
        name = cuda.get_device_name(device)
        problems.append(f"mixed_precision is bf16, but {name} only emulates it, slowly: set it to fp16")
    return problems


def describe_reduce_dtype(reduce_dtype: str, num_processes: int) -> str:
    """Say what a run's `reduce_dtype` does to the step.

    >>> describe_reduce_dtype("bf16", 1)
    'reduce_dtype bf16: one process sends no gradients, so nothing is rounded; on several the step is not exact'
    """
    if num_processes == 1:
        return (
            f"reduce_dtype {reduce_dtype}: one process sends no gradients, so nothing is rounded; on several the step is not "
            "exact"
        )
    return (
        f"reduce_dtype {reduce_dtype}: not the exact step. The gradients of {num_processes} processes, and their sum, are "
        f"rounded to {reduce_dtype}, otherwise for each number of processes. Half of the bytes of float32 are sent"
    )
