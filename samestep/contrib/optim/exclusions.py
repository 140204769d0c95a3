"""Rules of what excludes other optimizers: moments of 8 bits, gradients that add up in the moments."""

from samestep.recipe.rules import MULTI_GPU, Rule

RULES = [
    Rule(
        lambda f: f.optimizer_name == "adamw_8bit" and f.dtype != "float32",
        "dtype is {f.dtype}, but optimizer is adamw_8bit, which computes in float32",
        "set one of them to its default",
    ),
    Rule(
        lambda f: f.optimizer_name == "adamw_8bit" and f.is_sharded,
        "optimizer is adamw_8bit, but the launch file shards weights (FSDP), so that the rounding of moments would "
        "depend on the number of processes",
        f"set it to adamw, or {MULTI_GPU}",
    ),
    Rule(
        lambda f: f.is_folded and f.on_nonfinite == "skip",
        "on_nonfinite is skip, but with accumulation optimizer a gradient that is not finite is in the moments when "
        "it is found",
        "set it to stop, or accumulation to gradient",
    ),
    Rule(
        lambda f: f.is_folded and f.is_sharded,
        "accumulation is optimizer, but the launch file shards weights (FSDP), whose gradients are parts of tensors "
        "that hooks do not see",
        f"set it to gradient, or {MULTI_GPU}",
    ),
    Rule(
        lambda f: f.is_folded and f.is_fp16,
        "accumulation is optimizer, but mixed_precision is fp16, where a step whose scaled gradient overflows must be "
        "left out. It is in the moments already, then",
        "set it to gradient, or mixed_precision to bf16 or no",
    ),
]
