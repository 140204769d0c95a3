"""Launches that the programs refuse: the planner asks before it proposes one, and the programs when they start."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of a launch, for the rules.

    Attributes:
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
    """

    mixed_precision: str = "no"
    is_sharded: bool = False
    may_shard: bool = True
    accumulation: str = "gradient"
    is_reproducible: bool = False
    digest_steps: int | None = None
    noise_scale_steps: int | None = None
    optimizer: str = "adamw"
    base_quantization: str | None = None
    fault_tolerance: str = "none"
    num_processes: int = 1
    num_copies: int = 1
    communication: Communication | None = None
    reduce_dtype: str = "own"

    @property
    def is_replica(self) -> bool:
        return self.fault_tolerance == "step"

    @property
    def is_fp16(self) -> bool:
        return self.mixed_precision == "fp16"

    @property
    def is_folded(self) -> bool:
        return self.accumulation == "optimizer"


class Rule(NamedTuple):
    """A rule of what excludes what: a launch for which all of `holds` is true is refused.

    Attributes:
        holds: of `Facts`.
        reason, remedy: as in `Refusal`; {f.NAME} stands for a fact.
    """

    holds: Callable[[Facts], Any]
    reason: str
    remedy: str


MULTI_GPU = "launch with distributed_type MULTI_GPU"
RULES = (
    Rule(
        lambda f: f.is_replica and f.num_copies > 1,
        "fault_tolerance is step, where a replica is one copy of the model, but the launch has {f.num_copies} (HSDP)",
        "start each copy by a launch of its own, without parallelism_config",
    ),
    Rule(
        lambda f: f.is_replica and f.num_processes > 1 and not f.is_sharded,
        "fault_tolerance is step, where a replica is one copy of the model, but the launch has {f.num_processes}",
        "start each by a launch of its own with --num_processes 1, or shard weights over its processes (FSDP2)",
    ),
    Rule(
        lambda f: f.is_replica and f.is_fp16,
        "fault_tolerance is step, but mixed_precision is fp16, whose loss scale would differ between replicas",
        "set mixed_precision to bf16 or no",
    ),
    Rule(
        lambda f: f.communication is not None and f.is_sharded,
        "communication is {f.communication}, but the launch file shards weights (FSDP), so that no process has a worker's",
        f"{MULTI_GPU}, or set it to null",
    ),
    Rule(
        lambda f: f.communication is not None and f.is_fp16,
        "communication is {f.communication}, but mixed_precision is fp16, whose loss scale would differ between workers",
        "set mixed_precision to bf16 or no, or communication to null",
    ),
    Rule(
        lambda f: f.communication is not None and f.num_processes > (f.communication.num_workers or f.num_processes),
        "communication is {f.communication}, but the launch has {f.num_processes} processes, of which some had no worker",
        "launch {f.communication.num_workers} processes or fewer",
    ),
    Rule(
        lambda f: f.reduce_dtype != "own" and f.is_sharded,
        "reduce_dtype is {f.reduce_dtype}, but the launch file shards weights (FSDP), which has a reduction of its own",
        f"leave it out, or {MULTI_GPU}",
    ),
    Rule(
        lambda f: f.is_sharded and not f.may_shard,
        "the launch file shards weights (FSDP), which only programs of language models do",
        MULTI_GPU,
    ),
    Rule(
        lambda f: f.digest_steps is not None and f.is_sharded,
        "digest_steps is {f.digest_steps}, but the launch file shards weights (FSDP), so that no process has whole tensors",
        f"leave it out, or {MULTI_GPU}",
    ),
    Rule(
        lambda f: f.noise_scale_steps is not None and f.is_sharded,
        "noise_scale_steps is {f.noise_scale_steps}, but the launch file shards weights (FSDP), whose gradients are reduced "
        "before hooks see them",
        f"leave it out, or {MULTI_GPU}",
    ),
    Rule(
        lambda f: f.optimizer == "adamw_8bit" and f.is_sharded,
        "optimizer is adamw_8bit, but the launch file shards weights (FSDP), so that the rounding of moments would depend on "
        "the number of processes",
        f"set it to adamw, or {MULTI_GPU}",
    ),
    Rule(
        lambda f: f.base_quantization is not None and f.is_sharded,
        "base_quantization is {f.base_quantization}, but the launch file shards weights (FSDP), which cannot hold rows of "
        "packed weights",
        f"{MULTI_GPU}, or set it to null",
    ),
    Rule(
        lambda f: f.is_folded and f.is_sharded,
        "accumulation is optimizer, but the launch file shards weights (FSDP), whose gradients are parts of tensors that "
        "hooks do not see",
        f"set it to gradient, or {MULTI_GPU}",
    ),
    Rule(
        lambda f: f.is_folded and f.is_fp16,
        "accumulation is optimizer, but mixed_precision is fp16, where a step whose scaled gradient overflows must be left "
        "out, but then it is in the moments already",
        "set it to gradient, or mixed_precision to bf16 or no",
    ),
    Rule(
        lambda f: f.is_reproducible and f.is_sharded,
        "reproducible is given, but the launch file shards weights (FSDP), whose gradients are reduced in float32, so that "
        "their sums depend on the number of processes",
        f"leave it out, or {MULTI_GPU}",
    ),
    Rule(
        lambda f: f.is_reproducible and f.is_fp16,
        "reproducible is given, but mixed_precision is fp16, whose loss scale is not part of exact sums",
        "leave it out, or set mixed_precision to bf16 or no",
    ),
    Rule(
        lambda f: f.is_sharded and f.is_fp16,
        "mixed_precision is fp16, whose loss scale is not supported with FSDP",
        "set it to bf16 or no",
    ),
)
"""Rules in their order: the first that holds is said."""


def find_refusal(**facts: Any) -> Refusal | None:
    """Find the first rule that speaks against a launch, by what `Facts` holds; None: none does.

    >>> print(find_refusal(mixed_precision="fp16", is_sharded=True))
    mixed_precision is fp16, whose loss scale is not supported with FSDP: set it to bf16 or no
    """
    f = Facts(**facts)
    rule = next((rule for rule in RULES if rule.holds(f)), None)
    return None if rule is None else Refusal(rule.reason.format(f=f), rule.remedy.format(f=f))
