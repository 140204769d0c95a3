"""Defines the error for people's mistakes, and the hint that names what was probably meant."""

from collections.abc import Iterable
from difflib import get_close_matches


class UsageError(ValueError):
    """A mistake in a recipe, a flag, a file or a launch. Each problem names the field, its value, the rule and the remedy.

    Problems are collected and raised once, so that a user mends them all in one go.
    """

    def __init__(self, problems: str | Iterable[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def nearest(name: str, valid: Iterable[str]) -> str:
    """Make a hint with the valid names nearest to `name`, or with all of them, up to 800 characters, when none is near.

    >>> nearest("learning_rte", ["learning_rate", "seed"])
    'did you mean learning_rate?'
    >>> nearest("zzz", ["learning_rate", "seed"])
    'valid names: learning_rate, seed'
    """
    valid = sorted(valid)
    close = get_close_matches(name, valid, n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(close)}?"
    names = ", ".join(valid)
    return f"valid names: {names if len(names) <= 800 else names[:800].rpartition(', ')[0] + ', ...'}"
