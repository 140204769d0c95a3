"""Rules of what excludes what: fields that all recipes have, settings of a run, and its launch. A new one is one row here.

Rows about fields of one task stand in the class of its recipes (`samestep.recipe.tasks`), those of a way of `samestep.contrib`
beside it. docs/support.md is printed from all.
"""

import os
from shutil import which
from typing import Any

from samestep.errors import will_be_restarted
from samestep.recipe.extras import is_there, load_way
from samestep.recipe.rules import MULTI_GPU, Facts, Refusal, Rule, each

WAYS = (
    "samestep.contrib.replication.exclusions:RULES",
    "samestep.contrib.growing.exclusions:RULES",
    "samestep.contrib.communication.exclusions:RULES",
    "samestep.contrib.noise.exclusions:RULES",
    "samestep.contrib.doctor.exclusions:RULES",
    "samestep.contrib.optim.exclusions:RULES",
    "samestep.contrib.whole_batch.exclusions:RULES",
)
"""MODULE:NAME of the rows that ways bring; a way that was deleted has none."""
CUT_SETTINGS = (
    ("per_device_train_batch_size", "it is the size of micro-batches itself"),
    ("gradient_accumulation_steps", "the number of micro-batches follows from their size"),
)
"""Settings that --reproducible excludes, and why."""

RULES: list[Rule] = [
    Rule(  # the first one: what others propose would not help
        lambda f: f.is_sharded and not f.may_shard,
        "the launch file shards weights (FSDP), which only programs of language models do",
        MULTI_GPU,
    ),
    *(rule for place in WAYS if is_there(place) for rule in load_way(place, "a rule")),
    Rule(
        lambda f: (
            (f.second_moment is None) is f.estimates_second_moment
            and ("one of unbiased, mean_of_squares, sum_of_squares" if f.estimates_second_moment else "null")
        ),
        "second_moment is {f.second_moment}, but with accumulation {f.accumulation} and {f.optimizer_name} it must be "
        "{found}",
    ),
    # Gradients that are sent in 16 bits
    Rule(
        lambda f: f.reduce_dtype != "own" and f.is_folded,
        "reduce_dtype is {f.reduce_dtype}, but accumulation is optimizer, which sends moments, not gradients",
        "leave it out, or set accumulation to gradient",
    ),
    Rule(
        lambda f: f.reduce_dtype != "own" and f.is_sharded,
        "reduce_dtype is {f.reduce_dtype}, but the launch file shards weights (FSDP), which has a reduction of its own",
        f"leave it out, or {MULTI_GPU}",
    ),
    # What shards, and what watches
    Rule(
        lambda f: f.digest_steps is not None and f.is_sharded,
        "digest_steps is {f.digest_steps}, but the launch file shards weights (FSDP), so that no process has whole "
        "tensors",
        f"leave it out, or {MULTI_GPU}",
    ),
    Rule(
        lambda f: f.replicate_checkpoints and f.is_sharded,
        "replicate_checkpoints is true, but weights are sharded (FSDP2), so that no machine has a whole checkpoint",
        "leave it out, and give an output_dir that all machines see",
    ),
    Rule(
        lambda f: f.base_quantization is not None and f.is_sharded,
        "base_quantization is {f.base_quantization}, but the launch file shards weights (FSDP), which cannot hold "
        "rows of packed weights",
        f"{MULTI_GPU}, or set it to null",
    ),
    # The same bits on any number of processes
    *each(
        CUT_SETTINGS,
        lambda name, why: Rule(
            lambda f: f.is_reproducible and f[name] is not None,
            f"reproducible is {{f.reproducible}}, and {name} is {{f[{name}]}}",
            f"leave {name} out, {why}",
        ),
    ),
    Rule(
        lambda f: f.is_reproducible and f.reduce_dtype != "own",
        "reproducible is given, but reduce_dtype is {f.reduce_dtype}, which rounds sums",
        "leave one out",
    ),
    Rule(
        lambda f: f.is_reproducible and f.dtype != "float32",
        "reproducible is given, but dtype is {f.dtype}",
        "set dtype to float32, of which sums are exact",
    ),
    Rule(
        lambda f: f.is_reproducible and f.torch_compile,
        "reproducible is given, and torch_compile is true, whose code depends on the sizes that a process has met",
        "leave one out",
    ),
    Rule(
        lambda f: f.is_reproducible and f.is_folded,
        "reproducible is given, but accumulation is optimizer, whose moments depend on the order of the gradients",
        "set it to gradient",
    ),
    Rule(
        lambda f: f.is_reproducible and f.normalization == "batch" and not f.exact_batch_norm,
        "reproducible is given, but normalization is batch, which takes the statistics of the micro-batches that "
        "processes compute at one time",
        "set exact_batch_norm to true",
    ),
    Rule(
        lambda f: f.is_reproducible and f.is_sharded,
        "reproducible is given, but the launch file shards weights (FSDP), whose gradients are reduced in float32. So "
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
    # A run from begin to end
    Rule(
        lambda f: f.overwrite_output_dir and f.resume_from_checkpoint,
        "overwrite_output_dir and resume_from_checkpoint exclude each other",
        "leave one out",
    ),
    Rule(
        lambda f: f.overwrite_output_dir and f.fault_tolerance == "restart",
        "overwrite_output_dir and fault_tolerance restart exclude each other, as each restart would delete the run",
        "leave one out",
    ),
    Rule(
        lambda f: f.max_train_minutes is not None and will_be_restarted(),
        "max_train_minutes is {f.max_train_minutes}, but the launcher's --max_restarts would start the run again",
        "leave one out",
    ),
    Rule(
        lambda f: f.torch_compile and not any(map(which, (os.environ.get("CXX", "c++"), "g++", "clang++", "cl"))),
        "torch_compile is true, but there is no C++ compiler",
        "install g++, or leave it out",
    ),
    *each(
        ("early_stopping_patience", "load_best_model_at_end"),
        lambda name: Rule(
            lambda f: f[name] and f.eval_steps is None,
            f"{name} compares evaluations, but there is one only",
            "set eval_steps",
        ),
    ),
    Rule(
        lambda f: f.merge_adapter and f.lora_rank is None,
        "merge_adapter is true, but lora_rank is null, so that there is no adapter",
        "leave it out, or set lora_rank",
    ),
    Rule(
        lambda f: f.push_to_hub and f.lora_rank is not None and not f.merge_adapter and f.model_name_or_path is None,
        "push_to_hub is true, but the adapter's base has random weights, which are not on the hub",
        "add --merge_adapter, or set model_name_or_path",
    ),
]
"""Rules in their order: of those against a launch the first that holds is said, of the others all."""


def _list_rules(recipe: Any) -> list[Rule]:
    """List `RULES`, and those of a recipe's task."""
    return RULES + [rule for base in reversed(type(recipe).__mro__) for rule in vars(base).get("rules", ())]


def find_problems(recipe: Any = None, settings: Any = None) -> list[str]:
    """Find what is wrong with a recipe, with settings, or, given both, with their combination: a line for each rule."""
    return [str(refusal) for refusal in Facts(recipe, settings).find_refusals(_list_rules(recipe))]


def find_refusal(recipe: Any = None, settings: Any = None, **launch: Any) -> Refusal | None:
    """Find the first rule that speaks against a launch, arguments as of `Facts`; None: none does.

    >>> print(find_refusal(mixed_precision="fp16", is_sharded=True))
    mixed_precision is fp16, whose loss scale is not supported with FSDP: set it to bf16 or no
    """
    return next(Facts(recipe, settings, **launch).find_refusals(_list_rules(recipe)), None)
