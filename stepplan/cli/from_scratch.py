"""Plans the pretraining of a decoder of any size: `samestep plan --from_scratch`."""

import dataclasses
from pathlib import Path
from typing import Any

from samestep.cli.flags import build_each, drop_flags, make_subject_parser
from samestep.errors import UsageError
from samestep.recipe import catalog as recipes
from samestep.recipe.settings import limit, setting
from stepplan import pretraining
from stepplan.base_models import find_config
from stepplan.cli.plan import STEPS, PlanSettings, answer_recipe, read_tokens, write_recipe
from stepplan.workload import format_flags

SOURCE = (
    "github.com/karpathy/nanochat (92d63d4), scripts/base_train.py: width, heads, tokens, batch, rates and decay of a size "
    "(docs/planner.md), from the numbers of gpt_modern_124m"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScratchSettings:
    """Choose the size of a model that is pretrained"""

    from_scratch: bool = setting("pretrain it, from random weights", default=True)
    model_name_or_path: str | None = setting("its configuration; none: by depth or parameters", default=None)
    depth: int | None = setting(
        "its layers, from which width, heads, rates and tokens follow", limit(200), default=None
    )
    parameters: str | None = setting("its parameters (1B, 350M), of which the depth is the nearest", default=None)

    def problems(self) -> list[str]:
        names = ("model_name_or_path", "depth", "parameters")
        given = [name for name in names if getattr(self, name) is not None]
        return [] if len(given) == 1 else [f"from_scratch needs one of {', '.join(names)}, has {len(given)}: give one"]


def from_scratch(argv: list[str]) -> None:
    """Answer `plan --from_scratch`."""
    parser = make_subject_parser("plan", "--from_scratch --depth LAYERS")
    base = recipes.load(pretraining.BASE)
    for cls in (PlanSettings, ScratchSettings):
        parser.add_settings(cls)
    parser.add_settings(type(base), base, "recipe")
    flags = parser.parse(argv)
    settings: PlanSettings
    scratch: ScratchSettings
    settings, scratch = build_each(flags, [PlanSettings, ScratchSettings])
    typed = {name: value for name, value in flags.items() if name in {field.name for field in dataclasses.fields(base)}}
    if steps := [name for name in STEPS if name in typed and settings.num_train_tokens is not None]:
        raise UsageError(f"--num_train_tokens with {' and '.join(steps)}: leave out one of them")
    if scratch.model_name_or_path is not None:
        name = scratch.model_name_or_path
        if name in recipes.catalog_names():
            raise UsageError(f"{name} is a recipe, which says its own shape: leave --from_scratch out, or give --depth")
        shape = pretraining.read_shape(find_config(name), name)
    else:
        depth = scratch.depth or pretraining.find_depth(scratch.parameters or "")
        name, shape = f"a decoder of {depth} layers", pretraining.shape_of_depth(depth)
        shape |= {"max_position_embeddings": typed.get("block_size", getattr(base, "block_size", 1))}
    num_tokens = None if settings.num_train_tokens is None else read_tokens(settings.num_train_tokens)
    changes = pretraining.scale_recipe(shape, num_tokens, typed)
    recipe: Any = recipes.load(pretraining.BASE, changes)
    if settings.write_recipe is not None:
        write_recipe(settings.write_recipe, pretraining.BASE, {"source": SOURCE, "expect": "not measured"} | changes)
    mine = {field.name: True for cls in (ScratchSettings, type(base)) for field in dataclasses.fields(cls)}
    words = [
        "plan",
        pretraining.BASE,
        *format_flags(changes),
        *drop_flags(argv, [*mine, "num_train_tokens"]),
    ]
    subject = {"recipe": recipe.name, "title": f"{Path(name).name}, from scratch", "source": SOURCE}
    answer_recipe(pretraining.BASE, recipe, changes, settings, None, words, subject)
