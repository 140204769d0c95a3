"""Advises on the batch of a run that measured its noise: `samestep advise`."""

import dataclasses
import json

from samestep.cli.flags import read_folders, write_file
from samestep.contrib.advice import advice
from samestep.errors import UsageError
from samestep.printing import fold
from samestep.recipe.reading import format_name
from samestep.recipe.settings import limit, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdviseSettings:
    """Choose what a larger batch may cost, and what is written"""

    max_extra_tokens: float = setting(
        "share of its tokens that a larger batch may take more to the same loss", limit(1, 0.001), default=0.05
    )
    ramp: bool = setting("the changed recipe is that of a batch that grows with the noise scale", default=False)
    write_recipe: str | None = setting("file to write the changed recipe to; none: no file", default=None)
    json: bool = setting("print one JSON object", default=False)


def advise(argv: list[str]) -> int:
    """Advise on the batch of a run; return 1 if what was measured does not say, else 0."""
    folders, settings = read_folders("advise", "RUN_DIR [--FLAG VALUE ...]", argv, AdviseSettings, (1,))
    file = settings.write_recipe
    if file is not None and not file.endswith((".yaml", ".yml")):
        raise UsageError(f"write_recipe is {format_name(file)}, must end in .yaml: recipes are found by that")
    result, changed = advice.advise(folders[0], settings.max_extra_tokens, grows=settings.ramp)
    if file is not None and changed is not None:
        write_file("write_recipe", file, changed.to_yaml())
    else:
        file = None  # there is nothing to write
    print(json.dumps(result, allow_nan=False) if settings.json else fold("\n".join(advice.write(result, file))))
    return 1 if "unknown" in result else 0
