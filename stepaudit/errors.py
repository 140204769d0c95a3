"""Defines the error for people's mistakes, and the hint that names what was probably meant."""

import re
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
    >>> nearest("qwen3_8b", ["llama3_8b_lora_3090", "qwen3_0.6b_sft_3090"])
    'did you mean qwen3_0.6b_sft_3090?'
    >>> nearest("zzz", ["learning_rate", "seed"])
    'valid names: learning_rate, seed'
    """
    valid = sorted(valid)
    begin = re.split(r"[_.-]", name)[0]
    close = (
        get_close_matches(name, valid, n=3, cutoff=0.6)
        or [other for other in valid if len(begin) > 2 and re.split(r"[_.-]", other)[0] == begin][:3]
    )
    if close:
        return f"did you mean {' or '.join(close)}?"
    names = ", ".join(valid)
    return f"valid names: {names if len(names) <= 800 else names[:800].rpartition(', ')[0] + ', ...'}"
