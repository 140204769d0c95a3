"""`python -m recipes list | plan RECIPE | audit-script`; the first two answer without torch.

Exit code 0 fine, 1 a check failed, 2 bad usage.
"""

import dataclasses
import json
import sys

from recipes import recipe as recipes
from recipes.errors import UsageError, exit_code, nearest
from recipes.memory import model_of, planned_memory
from recipes.plan import solve_layout
from recipes.settings import POSITIVE, build, one_of, parse_flags, setting

USAGE = """usage: python -m recipes list
       python -m recipes plan RECIPE [--num_processes N] [--per_device_train_batch_size b]
                                     [--gradient_accumulation_steps k] [--mixed_precision no|bf16|fp16]
                                     [--gradient_checkpointing] [--sharded] [--json] [--FIELD VALUE ...]
       python -m recipes audit-script --vary "FLAG=VALUE,..." ... -- PROGRAM.py ARGS (--help says more)"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """How many processes, how the step is cut, and what else decides the memory of one process."""

    num_processes: int = setting("N", POSITIVE, default=1)
    per_device_train_batch_size: int | None = setting("most samples in one forward (b)", POSITIVE, default=None)
    gradient_accumulation_steps: int | None = setting("micro-steps per step (k)", POSITIVE, default=None)
    mixed_precision: str = setting("of the launch", one_of("no", "bf16", "fp16"), default="bf16")
    gradient_checkpointing: bool = setting("recompute activations in the backward", default=False)
    sharded: bool = setting(
        "divide weights, gradients and moments between the processes (FSDP2), instead of a copy each (DDP)",
        default=False,
    )
    json: bool = setting("print one JSON object", default=False)


def list_recipes() -> None:
    for name in recipes.catalog_names():
        recipe = recipes.load(name)
        print(f"{name:20} B {recipe.global_batch_size:<6} {recipe.description}")


def plan(name: str, argv: list[str]) -> None:
    cls = type(recipes.load(name))
    flags = parse_flags([PlanSettings, cls], argv, USAGE)
    names = {field.name for field in dataclasses.fields(PlanSettings)}
    settings = build(PlanSettings, {key: value for key, value in flags.items() if key in names}, "flags")
    recipe = recipes.load(name, {key: value for key, value in flags.items() if key not in names})
    layout = solve_layout(
        num_processes=settings.num_processes,
        global_batch_size=recipe.global_batch_size,
        per_device_train_batch_size=settings.per_device_train_batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
    )
    scaled = dataclasses.asdict(recipe.scaled())
    model = model_of(recipe)
    tokens_per_step = recipe.global_batch_size * model.length
    options = {
        "mixed_precision": settings.mixed_precision,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "sharded": settings.sharded,
    }
    memory = planned_memory(recipe, layout, **options)
    if settings.json:
        answer = {"recipe": recipe.name, "fingerprint": recipe.fingerprint, **scaled}
        answer |= dataclasses.asdict(layout) | {"shares": layout.shares}
        answer |= {
            "num_parameters": model.num_parameters,
            "flops_per_token": model.flops_per_token,
            "flops_per_sample": model.flops_per_sample,
            "tokens_per_step": tokens_per_step,
        }
        print(json.dumps(answer | options | {"memory": dataclasses.asdict(memory) | {"total": memory.total}}))
        return
    print(f"{recipe.name}: {recipe.description}\n  source     {recipe.source}\n  expect     {recipe.expect}")
    print(f"  layout     {layout}")
    print("  optimizer  " + ", ".join(f"{key} {value:.6g}" for key, value in scaled.items() if value is not None))
    print(f"  model      {model.num_parameters:,} parameters")
    print(
        f"  compute    {model.flops_per_token / 1e9:.4g} GFLOP per token, {model.flops_per_sample / 1e9:.1f} per sample of "
        f"{model.length}, forward and backward; at most {tokens_per_step:,} tokens per step"
    )
    used = [f"mixed_precision {settings.mixed_precision}"]
    used += [name for name in ("gradient_checkpointing", "sharded") if options[name]]
    print(f"  memory     {memory} ({', '.join(used)})")


def main() -> int | None:
    match sys.argv[1:]:
        case ["list"]:
            list_recipes()
        case ["audit-script", *argv]:
            from recipes.audit.script import audit_script  # here: it imports torch

            return audit_script(argv)
        case ["plan", name, *argv] if not name.startswith("-"):
            plan(name, argv)
        case [] | ["-h"] | ["--help"]:
            print(USAGE)
        case [command, *_]:
            hint = "it needs a recipe" if command == "plan" else nearest(command, ["list", "plan", "audit-script"])
            raise UsageError(f"python -m recipes {command}: {hint}\n{USAGE}")
    return None


if __name__ == "__main__":
    sys.exit(exit_code(main))
