"""Finds sentences and pages that are too long: `make prose`. What is generated, tables, code and formulas are left out.

A sentence ends with a full stop, a question mark or an exclamation mark; in a list each item is a paragraph of its own. A link
counts as its words, and what stands in backquotes as one word.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_WORDS, MAX_WORDS_BEGIN = 25, 20
"""Of a sentence; and on the pages that somebody reads first."""
BEGIN = ("README.md", "docs/index.md", "docs/start.md", "docs/install.md", "docs/which-script.md")
MAX_PAGE = 1200
"""Words of a page, without tables."""
LEFT_OUT = re.compile(
    r"<!-- ([\w ]+): begin -->.*?<!-- \1: end -->|^ *```.*?^ *```|<picture>.*?</picture>|<!--.*?-->",
    re.DOTALL | re.MULTILINE,
)
ITEM = re.compile(r" *(?:[-*]|\d+\.) +")
END = re.compile(r"(?<=[.!?])(?<!\.\.\.)(?<!e\.g\.)(?<!i\.e\.)[*_)\"]*\s+")


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a page, and the items of its lists, each in one line.

    >>> list(paragraphs("# Head\\n\\nOne\\nline.\\n\\n    a formula\\n\\n- An\\n  item.\\n- Another.\\n\\n| a | table |\\n"))
    ['One line.', 'An item.', 'Another.']
    """
    lines: list[str] = []
    for line in [*LEFT_OUT.sub("", text).splitlines(), ""]:
        is_item = ITEM.match(line)
        if lines and (is_item or not line.strip() or line.startswith(("|", "#"))):
            yield " ".join(lines)
            lines = []
        if line.strip() and not line.startswith(("|", "#")) and (lines or is_item or not line.startswith("    ")):
            lines.append(ITEM.sub("", line, count=1).strip() if is_item else line.strip())


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page.

    >>> list(sentences("It is `a b.c d`. See [the page](x.md) of 2.5 GB: it has more.\\n"))
    ['It is `...`.', 'See the page of 2.5 GB: it has more.']
    """
    for paragraph in paragraphs(text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "`...`", paragraph))
        yield from (sentence.strip() for sentence in END.split(words))


def find_long(name: str, text: str) -> list[str]:
    """List what is too long on a page, a line each."""
    most = MAX_WORDS_BEGIN if name in BEGIN else MAX_WORDS
    every = list(sentences(text))
    return [f"{name}: {count} words: {each}" for each in every if (count := len(each.split())) > most]


def count_words(text: str) -> int:
    """Count the words of a page's sentences."""
    return sum(len(each.split()) for each in sentences(text))


def pages() -> dict[str, str]:
    """Read the pages that people read, by name."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


if __name__ == "__main__":
    only = sys.argv[1:]
    problems = 0
    for name, text in pages().items():
        if only and name not in only:
            continue
        found = find_long(name, text)
        print(*found, sep="\n", end="\n" if found else "")
        words = count_words(text)
        if words > MAX_PAGE:
            print(f"{name}: {words:,} words, more than {MAX_PAGE:,}")
        problems += len(found) + (words > MAX_PAGE)
    sys.exit(f"{problems} too long" if problems else 0)
