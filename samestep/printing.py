"""Formats what is printed: numbers with their nouns, and lines that fit the terminal, which breaks them inside words."""

import shutil
import sys
import textwrap


def format_count(number: int, noun: str) -> str:
    """Write a number with its noun.

    >>> format_count(1, "process"), format_count(2048, "process"), format_count(2, "micro-batch"), format_count(0, "step")
    ('1 process', '2,048 processes', '2 micro-batches', '0 steps')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"


def describe_sizes(sizes: list[tuple[int, int]]) -> str:
    """Say how a batch grows, stage by stage if they are few.

    >>> describe_sizes([(100, 16), (50, 32)]), describe_sizes([(9, size) for size in range(16, 48)])
    ('batch 16 (100 steps), 32 (50)', 'batch 16 to 47 in 32 stages')
    """
    if len(sizes) > 6:
        return f"batch {sizes[0][1]:,} to {sizes[-1][1]:,} in {len(sizes)} stages"
    (number, size), *others = sizes
    return ", ".join([f"batch {size:,} ({number:,} steps)", *(f"{size:,} ({number:,})" for number, size in others)])


def round_number(value: float) -> str:
    """Write a number of 0.01 or more in two or three significant digits, with words for large ones.

    >>> [round_number(value) for value in (0, 0.0312, 5.42, 81.84, 869.3, 111269, 32768e6, 2.5e12)]
    ['0', '0.031', '5.4', '82', '869', '111,000', '32.8 billion', '2.5 trillion']
    """
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.3g} {word}"
    if value >= 100:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}" if value >= 0.01 else "0" if not value else "under 0.01"


def write_number(value: object) -> str:
    """Write a number for people: four digits behind the point below 100, none above; a text as it is.

    >>> [write_number(value) for value in (0.5, 7, 1234.5, "BERT")]
    ['0.5000', '7', '1,234', 'BERT']
    """
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.4f}" if abs(value) < 100 and not isinstance(value, int) else f"{value:,.0f}"


def line_width(most: int) -> int:
    """Return how many columns a line may have: `most`, or what a narrower terminal has."""
    return min(most, shutil.get_terminal_size().columns) if _is_terminal() else most


def fold(text: str, indent: int = 2) -> str:
    """Fold the lines of a text between words if standard output is a terminal; what follows is indented further."""
    if not _is_terminal():
        return text
    width = shutil.get_terminal_size().columns
    lines = [wrap(line, width, " " * (len(line) - len(line.lstrip()) + indent)) for line in text.split("\n")]
    return "\n".join(part for parts in lines for part in parts)


def reflow(text: str, most: int) -> str:
    """Break the lines of each paragraph anew, at `most` columns or where the terminal ends; indented ones stay.

    >>> reflow("a b\\nc\\n\\n  d\\n  e", 100)
    'a b c\\n\\n  d\\n  e'
    """
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        part if part.startswith(" ") else "\n".join(wrap(" ".join(part.split()), line_width(most)))
        for part in paragraphs
    )


def wrap(line: str, width: int, indent: str = "") -> list[str]:
    """Break a line between words; no word is broken. The lines that follow begin with `indent`.

    >>> wrap("aa bb cc", 6, "  "), wrap("12345678", 6), wrap("", 6)
    (['aa bb', '  cc'], ['12345678'], [''])
    """
    if len(line) <= width:
        return [line]
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()  # None: closed before the program began
