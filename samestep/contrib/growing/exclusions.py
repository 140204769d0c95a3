"""Rules of what excludes a batch that grows."""

from samestep.recipe.rules import Rule

RULES = [
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
]
