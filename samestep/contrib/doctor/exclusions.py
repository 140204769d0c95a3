"""Rules of what excludes norms of layers."""

from samestep.recipe.rules import MULTI_GPU, Rule

RULES = [
    Rule(
        lambda f: f.watch_layers is not None and f.is_sharded,
        "watch_layers is {f.watch_layers}, but the launch file shards weights (FSDP), of which no process has a whole layer",
        f"leave it out, or {MULTI_GPU}",
    ),
    Rule(
        lambda f: f.watch_layers is not None and f.is_folded,
        "watch_layers is {f.watch_layers}, but accumulation is optimizer, which takes the gradients away",
        "leave it out, or set accumulation to gradient",
    ),
    Rule(
        lambda f: f.watch_layers is not None and f.is_replica,
        "watch_layers is {f.watch_layers}, but fault_tolerance is step, whose replicas share one output_dir",
        "leave it out",
    ),
    Rule(
        lambda f: f.watch_layers is not None and f.communication,
        "watch_layers is {f.watch_layers}, but communication is {f.communication!r}, with which no process has the whole "
        "step's gradient",
        "leave it out",
    ),
]
