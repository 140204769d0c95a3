"""Answers `samestep plan`, by one of several modules."""

import re

WHAT_FITS = re.compile("--what[_-]fits(=|$)")


def plan(argv: list[str]) -> None:
    """Answer `plan`: of a recipe, of a model without one, or of all models that fit."""
    from stepplan.cli.plan import plan as plan_recipe
    from stepplan.cli.plan_model import plan_model
    from stepplan.cli.what_fits import what_fits

    if any(map(WHAT_FITS.match, argv)):
        what_fits([word.replace("--what-fits", "--what_fits", 1) for word in argv])
    elif argv and not argv[0].startswith("-"):
        plan_recipe(argv)
    else:
        plan_model(argv)
