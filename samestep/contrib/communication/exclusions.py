"""Rules of what excludes other algorithms than the exact step (a recipe's `communication`)."""

from samestep.recipe.rules import MULTI_GPU, Rule, each


def _find_multiple(value: int | None, number: int) -> int | None:
    """Find the nearest multiple of a number where a value is none.

    >>> _find_multiple(7, 4), _find_multiple(1, 4), _find_multiple(8, 4), _find_multiple(None, 4)
    (8, 4, None, None)
    """
    return None if value is None or value % number == 0 else max(1, round(value / number)) * number


RULES = [
    Rule(
        lambda f: f.communication and (f.communication.num_workers or 1) > f.global_batch_size,
        "communication is {f.communication!r}, but global_batch_size is {f.global_batch_size}, so that workers have "
        "no sample",
        "set that to {f.communication.num_workers} or more",
    ),
    Rule(
        lambda f: f.communication and f.batch_schedule is not None,
        "communication is {f.communication!r}, but batch_schedule is {f.batch_schedule!r}",
        "set one of them to null",
    ),
    Rule(
        lambda f: f.communication and f.is_folded,
        "communication is {f.communication!r}, but accumulation is optimizer, whose gradients are in the moments "
        "before workers exchange them",
        "set it to gradient",
    ),
    Rule(
        lambda f: f.communication and f.communication.is_local and f.optimizer_name == "muon",
        "communication is {f.communication!r}, but optimizer is muon, whose matrices are shared out over processes, "
        "so that all take a step together",
        "set it to adamw",
    ),
    Rule(
        lambda f: f.communication and f.normalization == "batch",
        "communication is {f.communication!r}, but normalization is batch, whose statistics are of all workers",
        "set it to group or frozen",
    ),
    Rule(
        lambda f: f.communication and f.is_reproducible,
        "reproducible is {f.reproducible}, but communication is {f.communication!r}, whose sums are not exact ones",
        "leave it out",
    ),
    Rule(
        lambda f: f.communication and f.noise_scale_steps is not None,
        "noise_scale_steps is {f.noise_scale_steps}, but communication is {f.communication!r}, with which no process has "
        "the whole step's gradient",
        "leave it out",
    ),
    Rule(
        lambda f: f.communication and f.communication.is_local and f.digest_steps is not None,
        "digest_steps is {f.digest_steps}, but communication is {f.communication!r}, with which tensors differ between "
        "workers",
        "leave it out",
    ),
    Rule(
        lambda f: f.communication and f.is_replica,
        "fault_tolerance is step, but communication is {f.communication!r}, whose workers a lost replica takes away",
        "set it to restart",
    ),
    Rule(
        lambda f: f.communication and f.reduce_dtype != "own",
        "reduce_dtype is {f.reduce_dtype}, but communication is {f.communication!r}, which sends something else than "
        "gradients",
        "leave it out",
    ),
    Rule(
        lambda f: f.communication and not f.communication.is_local and f.on_nonfinite == "skip",
        "on_nonfinite is skip, but communication is {f.communication!r}, whose error feedback such a gradient would spoil",
        "set it to stop",
    ),
    *each(
        ("stop_after_step", "checkpointing_steps", "eval_steps"),
        lambda name: Rule(
            lambda f: (
                f.communication
                and f.communication.is_local
                and not f.rehearse
                and _find_multiple(f[name], f.communication.num_steps)
            ),
            f"{name} is {{f[{name}]}}, but communication is {{f.communication!r}}, and only after an exchange is there one "
            "model",
            "set it to a multiple of {f.communication.num_steps}, such as {found}",
        ),
    ),
    Rule(
        lambda f: f.communication and f.is_sharded,
        "communication is {f.communication}, but the launch file shards weights (FSDP), so that no process has a worker's",
        f"{MULTI_GPU}, or set it to null",
    ),
    Rule(
        lambda f: f.communication and f.is_fp16,
        "communication is {f.communication}, but mixed_precision is fp16, whose loss scale would differ between workers",
        "set mixed_precision to bf16 or no, or communication to null",
    ),
    Rule(
        lambda f: f.communication and f.num_processes > (f.communication.num_workers or f.num_processes),
        "communication is {f.communication}, but the launch has {f.num_processes} processes, of which some had no worker",
        "launch {f.communication.num_workers} processes or fewer",
    ),
]
