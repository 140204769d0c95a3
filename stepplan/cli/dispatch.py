"""Answers `samestep plan`, by one of several modules, of which only the one that answers is imported."""

import importlib
import itertools
import os
import re

from samestep.errors import UsageError

WHAT_FITS = re.compile("--what[_-]fits(=|$)")
FROM_SCRATCH = re.compile("--from[_-]scratch(=true)?$")


def plan(argv: list[str]) -> None:
    """Answer `plan`: of a recipe, of a model without one, from scratch, or of all models that fit."""
    is_from_scratch = _is_from_scratch(argv)
    if argv and not argv[0].startswith("-") and (is_from_scratch or _is_model(argv[0])):
        argv = ["--model_name_or_path", *argv]
    if any(map(WHAT_FITS.match, argv)):
        name, argv = "what_fits", [word.replace("--what-fits", "--what_fits", 1) for word in argv]
    elif is_from_scratch:
        name, argv = "from_scratch", [word.replace("--from-scratch", "--from_scratch", 1) for word in argv]
    elif any(re.match("--parameters(=|$)", word) for word in argv):
        raise UsageError(
            "--parameters without --from_scratch: plan --from_scratch --parameters 400M plans a model of a size"
        )
    else:
        name = "plan" if argv and not argv[0].startswith("-") else "plan_model"
    module = importlib.import_module(f"stepplan.cli.{name}")
    getattr(module, name)(argv)


def _is_from_scratch(argv: list[str]) -> bool:
    """Tell whether a command line asks for training from random weights.

    >>> _is_from_scratch(["--from_scratch", "--depth", "2"]), _is_from_scratch(["--from_scratch", "false"])
    (True, False)
    """
    pairs = itertools.pairwise([*argv, ""])
    return any(FROM_SCRATCH.match(word) and following != "false" for word, following in pairs)


def _is_model(word: str) -> bool:
    """Tell whether the first word names a model: a folder, a configuration, OWNER/NAME; recipes are names or .yaml files."""
    return not word.endswith((".yaml", ".yml")) and (word.endswith(".json") or os.path.isdir(word) or "/" in word)
