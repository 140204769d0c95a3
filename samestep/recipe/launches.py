"""Launches that the programs refuse: the planner asks before it proposes one, and the programs when they start."""

from typing import NamedTuple

from samestep.recipe.communication import Communication


class Refusal(NamedTuple):
    """A launch that would not be what it says, or whose steps would not be the recipe's.

    Attributes:
        reason: field, value and rule.
        remedy: what to do instead.
    """

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.remedy}"


def find_refusal(
    *,
    mixed_precision: str = "no",
    is_sharded: bool = False,
    may_shard: bool = True,
    accumulation: str = "gradient",
    is_reproducible: bool = False,
    digest_steps: int | None = None,
    noise_scale_steps: int | None = None,
    optimizer: str = "adamw",
    base_quantization: str | None = None,
    fault_tolerance: str = "none",
    num_processes: int = 1,
    num_copies: int = 1,
    communication: Communication | None = None,
    reduce_dtype: str = "own",
) -> Refusal | None:
    """Find what speaks against a launch; None: nothing.

    Args:
        mixed_precision: no, fp16 or bf16.
        is_sharded: whether the launch shards weights (FSDP2).
        may_shard: whether the program can (`RunSettings.may_shard`).
        accumulation: the recipe's: gradient or optimizer.
        is_reproducible: whether the run is to be bit-identical on any number of processes (--reproducible).
        digest_steps, noise_scale_steps: the run's settings.
        optimizer: the recipe's.
        base_quantization: the recipe's, of the weights below adapters.
        fault_tolerance: the run's setting.
        num_processes: processes of the launch.
        num_copies: groups of these that each hold the whole model (HSDP).
        communication: the recipe's, read.
        reduce_dtype: the run's setting.

    >>> print(find_refusal(mixed_precision="fp16", is_sharded=True))
    mixed_precision is fp16, whose loss scale is not supported with FSDP: set it to bf16 or no
    """
    if fault_tolerance == "step" and num_copies > 1:
        return Refusal(
            f"fault_tolerance is step, where a replica is one copy of the model, but the launch has {num_copies} (HSDP)",
            "start each copy by a launch of its own, without parallelism_config",
        )
    if fault_tolerance == "step" and num_processes > 1 and not is_sharded:
        return Refusal(
            f"fault_tolerance is step, where a replica is one copy of the model, but the launch has {num_processes}",
            "start each by a launch of its own with --num_processes 1, or shard weights over its processes (FSDP2)",
        )
    if fault_tolerance == "step" and mixed_precision == "fp16":
        return Refusal(
            "fault_tolerance is step, but mixed_precision is fp16, whose loss scale would differ between replicas",
            "set mixed_precision to bf16 or no",
        )
    if communication is not None and is_sharded:
        return Refusal(
            f"communication is {communication}, but the launch file shards weights (FSDP), so that no process has a worker's",
            "launch with distributed_type MULTI_GPU, or set it to null",
        )
    if communication is not None and mixed_precision == "fp16":
        return Refusal(
            f"communication is {communication}, but mixed_precision is fp16, whose loss scale would differ between workers",
            "set mixed_precision to bf16 or no, or communication to null",
        )
    if communication is not None and num_processes > (communication.num_workers or num_processes):
        return Refusal(
            f"communication is {communication}, but the launch has {num_processes} processes, of which some had no worker",
            f"launch {communication.num_workers} processes or fewer",
        )
    if reduce_dtype != "own" and is_sharded:
        return Refusal(
            f"reduce_dtype is {reduce_dtype}, but the launch file shards weights (FSDP), which has a reduction of its own",
            "leave it out, or launch with distributed_type MULTI_GPU",
        )
    if is_sharded and not may_shard:
        return Refusal(
            "the launch file shards weights (FSDP), which only programs of language models do",
            "launch with distributed_type MULTI_GPU",
        )
    if digest_steps is not None and is_sharded:
        return Refusal(
            f"digest_steps is {digest_steps}, but the launch file shards weights (FSDP), so that no process has whole "
            "tensors",
            "leave it out, or launch with distributed_type MULTI_GPU",
        )
    if noise_scale_steps is not None and is_sharded:
        return Refusal(
            f"noise_scale_steps is {noise_scale_steps}, but the launch file shards weights (FSDP), whose gradients are reduced "
            "before hooks see them",
            "leave it out, or launch with distributed_type MULTI_GPU",
        )
    if optimizer == "adamw_8bit" and is_sharded:
        return Refusal(
            "optimizer is adamw_8bit, but the launch file shards weights (FSDP), so that the rounding of moments "
            "would depend on the number of processes",
            "set it to adamw, or launch with distributed_type MULTI_GPU",
        )
    if base_quantization is not None and is_sharded:
        return Refusal(
            f"base_quantization is {base_quantization}, but the launch file shards weights (FSDP), which cannot hold rows of "
            "packed weights",
            "launch with distributed_type MULTI_GPU, or set it to null",
        )
    if accumulation == "optimizer" and is_sharded:
        return Refusal(
            "accumulation is optimizer, but the launch file shards weights (FSDP), whose gradients are parts of tensors that "
            "hooks do not see",
            "set it to gradient, or launch with distributed_type MULTI_GPU",
        )
    if accumulation == "optimizer" and mixed_precision == "fp16":
        return Refusal(
            "accumulation is optimizer, but mixed_precision is fp16, where a step whose scaled gradient overflows must be left "
            "out, but then it is in the moments already",
            "set it to gradient, or mixed_precision to bf16 or no",
        )
    if is_reproducible and is_sharded:
        return Refusal(
            "reproducible is given, but the launch file shards weights (FSDP), whose gradients are reduced in float32, so that "
            "their sums depend on the number of processes",
            "leave it out, or launch with distributed_type MULTI_GPU",
        )
    if is_reproducible and mixed_precision == "fp16":
        return Refusal(
            "reproducible is given, but mixed_precision is fp16, whose loss scale is not part of exact sums",
            "leave it out, or set mixed_precision to bf16 or no",
        )
    if is_sharded and mixed_precision == "fp16":
        return Refusal("mixed_precision is fp16, whose loss scale is not supported with FSDP", "set it to bf16 or no")
    return None
