"""Rules of what excludes what: fields that all recipes have, settings of a run, and its launch. A new one is one row here.

Rows about fields of one task stand in the class of its recipes (`samestep.recipe.tasks`). docs/support.md is printed from both.
"""

from typing import Any

from samestep.recipe.exclusions import algorithms, replicas, runs
from samestep.recipe.rules import Facts, Refusal, Rule

RULES: list[Rule] = [*replicas.RULES, *algorithms.RULES, *runs.RULES]
"""Rules in their order: of those against a launch the first that holds is said, of the others all."""


def _list_rules(recipe: Any) -> list[Rule]:
    """List `RULES`, and those of a recipe's task."""
    return RULES + [rule for base in reversed(type(recipe).__mro__) for rule in vars(base).get("rules", ())]


def find_problems(recipe: Any = None, settings: Any = None) -> list[str]:
    """Find what is wrong with a recipe, with settings, or, given both, with their combination: a line for each rule."""
    return [str(refusal) for refusal in Facts(recipe, settings).find_refusals(_list_rules(recipe))]


def find_refusal(recipe: Any = None, settings: Any = None, **launch: Any) -> Refusal | None:
    """Find the first rule that speaks against a launch, arguments as of `Facts`; None: none does.

    >>> print(find_refusal(mixed_precision="fp16", is_sharded=True))
    mixed_precision is fp16, whose loss scale is not supported with FSDP: set it to bf16 or no
    """
    return next(Facts(recipe, settings, **launch).find_refusals(_list_rules(recipe)), None)
