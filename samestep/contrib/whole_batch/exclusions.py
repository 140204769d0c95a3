"""Rules of what excludes losses of the routers of experts (a recipe's `router_loss` and `router_z_loss_weight`)."""

from samestep.recipe.rules import Rule, each

WAYS = (
    (
        lambda f: f.communication is not None,
        "communication is {f.communication!r}, whose workers do not know the loads of a whole step",
        "set one of them to null",
    ),
    (
        lambda f: f.is_replica,
        "fault_tolerance is step, whose replicas count their own samples only",
        "set fault_tolerance to restart",
    ),
    (
        lambda f: f.torch_compile,
        "torch_compile is true, whose code does not hand out what routers return",
        "leave torch_compile out",
    ),
)
"""Tests of what excludes any loss of routers, why, and what to do instead."""

RULES = [
    *each(
        WAYS,
        lambda holds, why, remedy: Rule(
            lambda f: f.router_loss is not None and holds(f), f"router_loss is {{f.router_loss}}, but {why}", remedy
        ),
    ),
    *each(
        WAYS,
        lambda holds, why, remedy: Rule(
            lambda f: f.router_loss is None and f.router_z_loss_weight and holds(f),
            f"router_z_loss_weight is {{f.router_z_loss_weight}}, but {why}",
            remedy.replace("null", "null, or this to 0"),
        ),
    ),
    Rule(
        lambda f: f.router_loss == "bias" and f.lora_rank is not None,
        "router_loss is bias, but lora_rank is {f.lora_rank}, and a saved adapter has no biases of routers",
        "set router_loss to global or sequence, or lora_rank to null",
    ),
    Rule(
        lambda f: f.router_loss == "bias" and f.is_folded,
        "router_loss is bias, but accumulation is optimizer, which cannot leave out a step whose biases would stay",
        "set router_loss to global or sequence, or accumulation to gradient",
    ),
    Rule(
        lambda f: f.router_loss == "global" and f.noise_scale_steps is not None,
        "noise_scale_steps is {f.noise_scale_steps}, but router_loss is global, so that the gradients of a step's samples "
        "depend on each other",
        "leave it out, or set router_loss to sequence",
    ),
]
