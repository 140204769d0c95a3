"""Lists the strings of the programs that a person can see, and finds the sentences that are too long: `make strings`.

    python docs/strings.py                    # every string: file, line, words of its longest sentence, text
    python docs/strings.py --long             # only those with a sentence of more than 25 words

A string is seen if it has a space between two words and is no docstring: messages, help, logs, parts of cards and pages. What
is put in at run time stands as `{}` and counts as one word. A sentence ends as in docs/prose.py, and at an empty line. Code
and lists of names are no sentences.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from prose import END, MAX_WORDS, ROOT

PROGRAMS = ("samestep", "stepaudit", "stepplan", "scripts")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
CODE = re.compile(r"`[^`]*`")
IN_PARTS = re.compile(r"\n\s*\n|\n(?=\s*[-*|#]|    )")
"""An empty line, an item of a list, a row of a table and a line of code end a sentence."""
NO_SENTENCES = ("from transformers import", "import soundfile", "plan bert_large", "JPEG PNG", '"local_sgd of')
"""How code and lists of names begin."""


class Seen(NamedTuple):
    """A string that a person can see."""

    path: str
    line: int
    words: int
    """Of its longest sentence."""
    text: str


def count_words(text: str) -> int:
    """Count the words of the longest sentence.

    >>> count_words("field {}: must be a number. Write `--rate 0.1` or leave it out")
    8
    """
    if text.startswith(NO_SENTENCES):
        return 0
    parts = IN_PARTS.split(CODE.sub("`...`", text))
    return max(len(sentence.split()) for part in parts for sentence in END.split(" ".join(part.split())))


def find_strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each string that is neither a docstring nor a single word.

    >>> list(find_strings(ast.parse("'''Seen by none.'''\\nprint(f'a {1 + 1} b', 'c')\\nraise ValueError('d ' + 'e f')")))
    [(2, 'a {} b'), (3, 'e f')]
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            continue  # a docstring, or the text below a constant: for readers of the code
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)  # type: ignore[misc]
            yield from ((node.lineno, text) for _ in [0] if re.search(r"\S\s+\S", text))
            yield from (
                found for part in node.values if isinstance(part, ast.FormattedValue) for found in find_strings(part)
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"\S\s+\S", node.value):
            yield node.lineno, node.value
        else:
            yield from find_strings(node)


def list_strings(root: Path = ROOT) -> list[Seen]:
    """List what a person can see of all programs."""
    seen = []
    for program in PROGRAMS:
        for path in sorted((root / program).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            found = find_strings(ast.parse(path.read_text(encoding="utf-8")))
            seen += [Seen(name, line, count_words(text), text) for line, text in found]
    return seen


def main() -> None:
    """Print the strings, and end with an error if a sentence is too long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="only those that are too long")
    arguments = parser.parse_args()
    strings = list_strings()
    too_long = [each for each in strings if each.words > MAX_WORDS]
    for each in too_long if arguments.long else strings:
        print(f"{each.path}:{each.line}: {each.words}: {' '.join(each.text.split())}")
    sys.exit(f"{len(too_long)} of {len(strings):,} too long" if too_long else 0)


if __name__ == "__main__":
    main()
