"""Answers `samestep plan`, by one of several modules."""

import os
import re

WHAT_FITS = re.compile("--what[_-]fits(=|$)")


def plan(argv: list[str]) -> None:
    """Answer `plan`: of a recipe, of a model without one, or of all models that fit."""
    from stepplan.cli.from_scratch import is_asked_for, plan_from_scratch
    from stepplan.cli.plan import plan as plan_recipe
    from stepplan.cli.plan_model import plan_model
    from stepplan.cli.what_fits import what_fits

    is_from_scratch = is_asked_for(argv)
    if argv and not argv[0].startswith("-") and (is_from_scratch or _is_model(argv[0])):
        argv = ["--model_name_or_path", *argv]
    if any(map(WHAT_FITS.match, argv)):
        what_fits([word.replace("--what-fits", "--what_fits", 1) for word in argv])
    elif is_from_scratch:
        plan_from_scratch(argv)
    elif argv and not argv[0].startswith("-"):
        plan_recipe(argv)
    else:
        plan_model(argv)


def _is_model(word: str) -> bool:
    """Tell whether the first word names a model: a folder, a configuration, OWNER/NAME; recipes are names or .yaml files."""
    return not word.endswith((".yaml", ".yml")) and (word.endswith(".json") or os.path.isdir(word) or "/" in word)
