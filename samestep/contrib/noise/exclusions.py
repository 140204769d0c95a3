"""Rules of what excludes measurements of the gradient's noise."""

from samestep.recipe.rules import MULTI_GPU, Rule

RULES = [
    Rule(
        lambda f: f.noise_scale_steps is not None and f.is_sharded,
        "noise_scale_steps is {f.noise_scale_steps}, but the launch file shards weights (FSDP), whose gradients are "
        "reduced before hooks see them",
        f"leave it out, or {MULTI_GPU}",
    ),
    Rule(
        lambda f: f.noise_scale_steps is not None and f.global_batch_size == 1,
        "noise_scale_steps is {f.noise_scale_steps}, but a global batch of one sample says nothing of its noise",
        "leave it out, or set global_batch_size to 2 or more",
    ),
    Rule(
        lambda f: f.noise_scale_steps is not None and f.is_folded,
        "noise_scale_steps is {f.noise_scale_steps}, but accumulation is optimizer, which takes the gradients away",
        "leave it out, or set accumulation to gradient",
    ),
    Rule(
        lambda f: f.noise_scale_steps is not None and f.normalization == "batch",
        "noise_scale_steps is {f.noise_scale_steps}, but normalization is batch, so that the gradients of a step's "
        "samples depend on each other",
        "leave it out, or set normalization to group or frozen",
    ),
]
