"""Rules of what excludes other algorithms than the step of one batch: batches that grow, workers, gradients in 16 bits."""

from samestep.recipe.rules import MULTI_GPU, Rule, each


def _find_multiple(value: int | None, number: int) -> int | None:
    """Find the nearest multiple of a number where a value is none.

    >>> _find_multiple(7, 4), _find_multiple(1, 4), _find_multiple(8, 4), _find_multiple(None, 4)
    (8, 4, None, None)
    """
    return None if value is None or value % number == 0 else max(1, round(value / number)) * number


RULES = [
    Rule(
        lambda f: (
            (f.second_moment is None) is f.estimates_second_moment
            and ("one of unbiased, mean_of_squares, sum_of_squares" if f.estimates_second_moment else "null")
        ),
        "second_moment is {f.second_moment}, but with accumulation {f.accumulation} and {f.optimizer_name} it must be "
        "{found}",
    ),
    # A batch that grows
    Rule(
        lambda f: (g := f.batch_schedule) and g.kind == "stages" and g.sizes[-1] != f.global_batch_size and g.sizes[-1],
        "batch_schedule is {f.batch_schedule!r}, but global_batch_size is {f.global_batch_size}, which is the largest "
        "batch",
        "set it to {found}",
    ),
    Rule(
        lambda f: (g := f.batch_schedule) and g.kind != "stages" and g.first_size >= f.global_batch_size,
        "batch_schedule is {f.batch_schedule!r}, but it grows to global_batch_size {f.global_batch_size}",
        "set that to more",
    ),
    Rule(
        lambda f: (g := f.batch_schedule) and g.kind == "seesaw" and f.lr_scheduler_type == "constant",
        "batch_schedule is {f.batch_schedule!r}, which grows as the learning rate falls, but lr_scheduler_type is "
        "constant",
        "choose another one",
    ),
    Rule(
        lambda f: (g := f.batch_schedule) and g.kind == "noise" and f.max_train_steps is not None,
        "batch_schedule is {f.batch_schedule!r}, so that nobody knows yet how many steps there will be, but "
        "max_train_steps is {f.max_train_steps}",
        "give num_train_epochs instead",
    ),
    Rule(
        lambda f: (g := f.batch_schedule) and g.kind == "noise" and f.noise_scale_steps is None,
        "batch_schedule is {f.batch_schedule!r}, but noise_scale_steps is not set, so that nothing is measured",
        "set it",
    ),
    Rule(
        lambda f: (g := f.batch_schedule) and g.unit == "tokens" and f.tokens_per_sample is None,
        "batch_schedule is {f.batch_schedule!r}, but samples of this recipe have different numbers of tokens",
        "give shares of the training, or samples",
    ),
    Rule(
        lambda f: (g := f.batch_schedule) and g.kind == "seesaw" and f.lr_scaling_rule != "none",
        "batch_schedule is {f.batch_schedule!r}, but lr_scaling_rule is {f.lr_scaling_rule}, which knows one batch",
        "set it to none",
    ),
    Rule(
        lambda f: (g := f.batch_schedule) and g.kind != "seesaw" and f.lr_scaling_rule != "none",
        "batch_schedule is {f.batch_schedule!r}, but lr_scaling_rule is {f.lr_scaling_rule}, which knows one batch",
        "set it to none; `rate: sqrt` in batch_schedule (`, rate by sqrt` in a flag) makes the learning rate follow the batch",
    ),
    Rule(
        lambda f: f.batch_schedule and (f.lr_num_steps is not None or f.lr_first_step),
        "batch_schedule is {f.batch_schedule!r}, so that the learning rate counts samples, but lr_num_steps or "
        "lr_first_step counts steps of another training",
        "set them to null and 0",
    ),
    # Other algorithms than the exact step
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
]
