"""Questions and answers from the examples in the docstrings of Python's own modules: statements, and what Python prints.

They are read from the source: nothing is imported or run. They differ a little between versions of Python, as the documentation
does. A question is all statements of a docstring up to one with an output, which is the answer.
"""

import doctest
import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from samestep.data.builtin.drawn_chats import find_split
from samestep.data.builtin.python_docs import python_docstrings

QUESTION = "What does Python print last?\n"
VARYING = re.compile(r"0x[0-9a-fA-F]{4,}|\.\.\.")
"""Parts of outputs that are others each time, as addresses, or that are left out."""


class Example(NamedTuple):
    """An example of a docstring.

    Attributes:
        module: name of the module.
        prompt: the statements, at the `>>>` prompt.
        answer: what the last one prints.
        split: train or validation; that of all examples that begin with the same statement, so of a whole docstring.
    """

    module: str
    prompt: str
    answer: str
    split: str


@functools.cache
def find_examples() -> tuple[Example, ...]:
    """Find the examples of the standard library, in the order of its modules; no prompt comes twice.

    Left out are outputs with an address or an ellipsis, examples that doctest skips, and prompts with several answers.
    """
    examples = {}
    answers: dict[str, set[str]] = {}
    for module, text in python_docstrings():
        for example in _read_docstring(module, text):
            examples.setdefault(example.prompt, example)
            answers.setdefault(example.prompt, set()).add(example.answer)
    return tuple(example for prompt, example in examples.items() if len(answers[prompt]) == 1)


def _read_docstring(module: str, text: str) -> Iterator[Example]:
    try:
        statements = doctest.DocTestParser().get_examples(text)
    except ValueError:  # indented otherwise than doctest reads
        return
    prompt = QUESTION
    for statement in statements:
        first, *rest = statement.source.rstrip("\n").split("\n")
        prompt += "\n".join([f">>> {first}", *(f"... {line}" for line in rest)]) + "\n"
        answer = statement.want.replace("<BLANKLINE>", "").strip()
        is_skipped = statement.options.get(doctest.SKIP, False)
        if answer and not is_skipped and not VARYING.search(answer):
            yield Example(module, prompt.rstrip("\n"), answer, find_split(statements[0].source))
