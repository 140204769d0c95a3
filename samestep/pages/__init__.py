"""Common parts of all HTML pages: each is one file without addresses outside; escaped texts, charts, axes, numbers for people.

The pages of plans, of training data and of running trainings include the templates of templates/: frame, charts, style, script.
"""

import base64
import dataclasses
import datetime
import functools
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.printing import format_count

if TYPE_CHECKING:  # imported by those who render a page
    import jinja2

TEMPLATES = Path(__file__).parent / "templates"


@functools.cache  # a template is compiled once
def make_environment(*folders: Path, is_page: bool = True) -> "jinja2.Environment":
    """Make what renders templates of these folders and of this one; on pages texts are escaped. No name may be missing."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, TEMPLATES]),
        autoescape=is_page,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "number": format_number,
        "percent": format_percent,
        "seconds": format_seconds,
        "duration": format_duration,
        "format_count": format_count,
        "words": format_words,
        "bytes": format_bytes,
        "date": format_date,
        "count": format_whole,
    }
    environment.globals["policy"] = _policy
    return environment


def _policy(style: str, script: str | None = None, has_images: bool = False) -> str:
    """Write the policy of a page for browsers: this style and this script, as they stand between their tags, and nothing else.

    With `has_images` images that stand in the page itself (data: URIs), too.

    Browsers run no other script and take no other style, wherever it came from; attributes of elements hold none, either.
    """
    parts = {"style": style, "script": script}
    rules = [
        f"{name}-src 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for name, text in parts.items()
        if text is not None
    ]
    rules += ["img-src data:"] * has_images
    return "; ".join(["default-src 'none'", *rules, "base-uri 'none'", "form-action 'none'"])


def find_policy(page: str) -> str:
    """Find the policy in a page, which a server sends as a header, too."""
    found = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    assert found is not None, "every page has one"
    return found[1]


# ----------------------------------------------------------------------------------------------------------------- axes


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis from low to high; ticks are (value, text)."""

    label: str
    low: float
    high: float
    ticks: list[tuple[float, str]]
    is_log: bool = False

    def position(self, value: float, digits: int = 3) -> str:
        """Write the place of a value as per cent of the way from low to high."""
        return f"{self._locate(value):.{digits}f}"

    def top_position(self, value: float) -> str:
        """Write the place of a value as per cent of the way from high to low, as heights are counted from the top."""
        return f"{100 - self._locate(value):.3f}"

    def _locate(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = (math.log(number) for number in (value, low, high))
        return 100 * (value - low) / (high - low) if high > low else 50.0


def linear_axis(label: str, high: float, text: Callable[[float], str] | None = None) -> Axis:
    """Make an axis from 0, with a tick for at most five steps of 1, 2 or 5 times a power of ten."""
    high = high or 1.0
    step = next(step for step in _round_numbers(high / 10) if step >= high / 5)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    values = [number * step for number in range(6) if number * step <= high * (1 + 1e-9)]
    return Axis(label, 0.0, high, [(value, text(value) if text else f"{value:,.{digits}f}") for value in values])


def log_axis(label: str, low: float, high: float, values: Sequence[float] = ()) -> Axis:
    """Make a logarithmic axis from low to high, with ticks at `values`, or at round numbers from below low to above high."""
    if not values:
        values = list(itertools.takewhile(lambda value: value < 5 * high, _round_numbers(low / 5)))
        low, high = max(v for v in values if v <= low), min(v for v in values if v >= high)
        values = [v for v in values if low <= v <= high]
        tens = [v for v in values if f"{v:e}".startswith("1.0")]
        values = tens if len(tens) > 3 else values
    stride = -(-len(values) // 7)
    return Axis(label, low, high, [(value, format_tick(value)) for value in values[::stride]], is_log=True)


def _round_numbers(start: float) -> Iterable[float]:
    """Yield 1, 2 and 5 times the powers of ten, rising, from a number of at most `start` on."""
    for exponent in itertools.count(math.floor(math.log10(start))):
        yield from (float(f"{digit}e{exponent}") for digit in (1, 2, 5))


# -------------------------------------------------------------------------------------------------------------- numbers


def format_number(value: float) -> str:
    """Write three significant digits, or all digits before the point.
    >>> [format_number(value) for value in (0, 0.0123456, 1.5, 83.266, 152870.3)]
    ['0', '0.0123', '1.50', '83.3', '152,870']
    """
    if isinstance(value, int) or not value:
        return f"{value:,.0f}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def format_whole(value: float) -> str:
    """Write a count whole, a mean count with two digits.

    >>> format_whole(124439808), format_whole(2083.3333), format_whole(1000.0)
    ('124,439,808', '2,083.33', '1,000')
    """
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}".rstrip("0").rstrip(".")


def format_percent(share: float) -> str:
    """Write a share of 1 as per cent.

    >>> format_percent(0.5438), format_percent(1)
    ('54.4 %', '100.0 %')
    """
    return f"{100 * share:.1f} %"


def format_seconds(value: float) -> str:
    """Write seconds in s, ms or µs.

    >>> [format_seconds(value) for value in (0, 2e-6, 0.0123, 3.97)]
    ['0 s', '2.00 µs', '12.3 ms', '3.97 s']
    """
    size, unit = next(((size, unit) for size, unit in ((1, "s"), (1e3, "ms")) if size * value >= 1), (1e6, "µs"))
    return f"{format_number(size * value)} {unit}" if value else "0 s"


def format_duration(seconds: float) -> str:
    """Write a duration in its two largest units.
    >>> [format_duration(value) for value in (12.3, 3599.8, 5400, 254113)]
    ['12.3 s', '1 hour', '1 hour 30 minutes', '2 days 23 hours']
    """
    units = [("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1)]
    for (name, size), (small_name, small) in itertools.pairwise(units):
        count, rest = divmod(round(seconds / small), size // small)
        if count:
            return format_count(count, name) + (f" {format_count(rest, small_name)}" if rest else "")
    return format_seconds(seconds)


def format_bytes(num_bytes: float) -> str:
    """Write bytes in GB or MB, which are 1e9 and 1e6.

    >>> format_bytes(96e9), format_bytes(498e6)
    ('96.0 GB', '498 MB')
    """
    return f"{format_number(num_bytes / 1e9)} GB" if num_bytes >= 1e9 else f"{format_number(num_bytes / 1e6)} MB"


def format_date(text: str) -> str:
    """Write a date and time as people do.

    >>> format_date("2026-11-28T21:05")
    'Saturday 28 November 2026, 21:05'
    """
    moment = datetime.datetime.fromisoformat(text)
    return moment.strftime(f"%A {moment.day} %B %Y, %H:%M")


def format_words(count: int) -> str:
    """Write a large count with millions and billions as words.

    >>> format_words(1557611200), format_words(110106428), format_words(4200)
    ('1.56 billion', '110 million', '4,200')
    """
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{format_number(count / size)} {name}"
    return f"{count:,}"


def format_tick(value: float) -> str:
    """Write the number of a tick, shortened where nothing is lost.

    >>> [format_tick(value) for value in (0, 0.5, 512, 1024, 200000.0, 1e6)]
    ['0', '0.5', '512', '1,024', '200k', '1M']
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size and value % (size / 10) == 0:
            return f"{value / size:g}{letter}"
    return f"{value:,g}" if value < 1 else f"{value:,.0f}"
