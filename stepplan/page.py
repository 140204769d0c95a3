"""A plan as one HTML page that needs no other file: memory, time, scaling, the learning rate, and the command that launches it.

And what fits on some hardware, as such a page. The templates in templates/, for Jinja, decide how it looks: page.html.j2 and
fits.html.j2, their frame, charts, style and script. This module computes the values that they show.
"""

import base64
import dataclasses
import datetime
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.printing import format_count

if TYPE_CHECKING:  # imported by those who render a page
    import jinja2

TEMPLATES = Path(__file__).parent / "templates"
LONGEST_BAR = 1.5
"""Largest length of a bar, in memories of the device; longer bars are cut off and marked."""
OPTIMIZER = ("learning_rate", "muon_learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "warmup_epochs")
STEPS = ("num_steps", "num_warmup_steps", "steps_per_epoch", "energy_kwh", "tokens_per_second")
COSTS = ("seconds_to_end", "seconds_to_end_range", "cost", "cost_range", "cost_per_epoch", "cost_per_billion_tokens")
DATES = ("is_adapter", "start", "end", "write_command")
DISK = ("disk_bytes", "data_bytes", "download_bytes", "host_memory", "checkpoint_bytes", "model_bytes")
INTERRUPTIONS = ("checkpoint_seconds", "checkpointing_seconds", "interruption_seconds", "interruption_cost")
SPOT = ("interruptions_per_day", "seconds_with_interruptions", "cost_with_interruptions")
LONGEST_NAME = 17
"""Characters of a hardware's name beside a bar."""
TIME_UNITS = ((3600, "hours"), (60, "minutes"), (0, "seconds"))
CHARTS = ("micro_batches", "learning_rates", "scale", "rows")
OPTIONAL = (
    *OPTIMIZER,
    *STEPS,
    *COSTS,
    *DATES,
    *DISK,
    *INTERRUPTIONS,
    *SPOT,
    *CHARTS,
    "warnings",
    "notes",
    "unverified",
    "device",
    "expect",
    "hint",
)
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
WORDS = {
    "products": "matrix products",
    "memory_traffic": "memory traffic between them",
    "weights": "reading and casting weights",
    "launches": "starting kernels",
    "optimizer": "clipping and update",
    "loading": "waiting for samples",
    "exposed_communication": "waiting for communication",
    "autocast_cache": "16-bit copies of weights",
    "gathered": "gathered weights",
    "head": "logits and head",
}


def page(answer: dict[str, Any]) -> str:
    """Write the whole page: style and script inside, no address outside; no text of the answer is markup.

    Args:
        answer: the object that `python -m recipes plan RECIPE --on HARDWARE --json` prints, with `description` and `source`.
            A part of the page is left out where its key is missing or None: `micro_batches` (one bar stays),
            `learning_rates`, `scale`, `rows` (of several hardware), `warnings` and single numbers.

    Returns:
        HTML.

    Raises:
        jinja2.UndefinedError: another key is missing.
    """
    environment = make_environment(TEMPLATES)
    answer = dict.fromkeys(OPTIONAL) | answer
    parts = {"memory": _memory(answer), "time": _time(answer), "scaling": _scaling(answer), "rate": _rate(answer)}
    parts["comparison"] = _comparison(answer["rows"])
    return str(environment.get_template("page.html.j2").render(answer=answer, **parts))


def fits_page(answer: dict[str, Any], table: Sequence[Sequence[str]], band: str) -> str:
    """Write the page of `plan --what_fits`, as `page` does.

    Args:
        answer: the object that `python -m recipes plan --what_fits HARDWARE --json` prints.
        table: names of columns, and then a row of cells for each of the answer's rows, the model's name first.
        band: how far speeds may be off, in words.
    """
    num_models = len({row["model"] for row in answer["rows"]})
    columns, *rows = table
    columns = [*columns[:-1], "tokens/s at the longest"]  # a card of a row shows no order of columns
    values = {"columns": columns, "rows": [(row[0], row[1:]) for row in rows], "band": band, "num_models": num_models}
    values |= {"num_tried": num_models + len(answer["too_large"])}
    page: str = make_environment(TEMPLATES).get_template("fits.html.j2").render(answer=answer, **values)
    return page


def make_environment(*folders: Path) -> "jinja2.Environment":
    """Make what renders templates of these folders: texts are escaped, and a name that is missing is an error."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters = (_number, _percent, _seconds, _duration, format_count, _words, _name, _bytes, _date, _count)
    environment.filters |= {f.__name__.removeprefix("_"): f for f in filters}
    environment.globals["policy"] = _policy
    return environment


def _policy(style: str, script: str | None = None) -> str:
    """Write the policy of a page for browsers: this style and this script, as they stand between their tags, and nothing else.

    Browsers run no other script and take no other style, wherever it came from; attributes of elements hold none, either.
    """
    parts = {"style": style, "script": script}
    rules = [
        f"{name}-src 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for name, text in parts.items()
        if text is not None
    ]
    return "; ".join(["default-src 'none'", *rules, "base-uri 'none'", "form-action 'none'"])


def find_policy(page: str) -> str:
    """Find the policy in a page, which a server sends as a header, too."""
    found = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    assert found is not None, "every page has one"
    return found[1]


# ------------------------------------------------------------------------------------------------------------- sections


@dataclasses.dataclass(frozen=True)
class _Bar:
    """A row of a chart: parts are (class of the colour, name, value, start), `end` is the end of the last part."""

    name: str
    note: str
    parts: list[tuple[str, str, float, float]]
    end: float
    is_chosen: bool = False


def _bar(name: str, note: str, parts: list[tuple[str, str, float]], is_chosen: bool = False) -> _Bar:
    """Make a bar of parts (class of the colour, name, value) that are drawn one after the other."""
    *starts, end = itertools.accumulate((value for _, _, value in parts), initial=0.0)
    return _Bar(name, note, [(*part, start) for part, start in zip(parts, starts, strict=True)], end, is_chosen)


def _memory(answer: dict[str, Any]) -> dict[str, Any]:
    own_size, capacity = answer["per_device_train_batch_size"], answer["memory_of_device"]
    cuts = answer["micro_batches"] or [
        {
            "per_device_train_batch_size": own_size,
            "gradient_accumulation_steps": answer["gradient_accumulation_steps"],
            "memory": answer["memory"],
            "needed": answer["memory_needed"],
            "fits": answer["memory_needed"] <= capacity,
            "seconds": answer["time"]["total"],
        }
    ]
    items = [item for item in answer["memory"] if item != "total"]
    # Item -> number of its colour, for items that some micro-batch has
    item_numbers = {item: number for number, item in enumerate(items, 1) if any(cut["memory"][item] for cut in cuts)}
    bars, rows = [], []
    for cut in cuts:
        b, k = cut["per_device_train_batch_size"], cut["gradient_accumulation_steps"]
        parts = [(f"c{number}", _name(item), cut["memory"][item] / 1e9) for item, number in item_numbers.items()]
        parts.append(("band", "margin", (cut["needed"] - cut["memory"]["total"]) / 1e9))
        need, is_chosen = _number(cut["needed"] / 1e9), b == own_size and len(cuts) > 1
        bars.append(_bar(f"b {b:,}, k {k:,}", f"{'✓' if cut['fits'] else '✕'} {need} GB", parts, is_chosen))
        sizes = [_number(cut["memory"][item] / 1e9) for item in [*item_numbers, "total"]]
        seconds = "" if cut["seconds"] is None else _seconds(cut["seconds"])
        first = f"{b:,}{' (chosen)' if is_chosen else ''}"
        rows.append((first, [f"{k:,}", *sizes, need, "yes" if cut["fits"] else "no", seconds]))
    longest = max(cut["needed"] for cut in cuts)
    axis = linear_axis("GB (1e9 bytes)", min(1.03 * max(longest, capacity), LONGEST_BAR * capacity) / 1e9)
    columns = [f"{_name(item)}, GB" for item in item_numbers]
    shown: dict[str, Any] = {"item_numbers": item_numbers, "axis": axis, "bars": bars, "columns": columns, "rows": rows}
    return shown | {"is_choice": len(cuts) > 1}


def _time(answer: dict[str, Any]) -> dict[str, Any]:
    time = answer["time"]
    parts = {name: value for name, value in time.items() if name not in ("communication", "at_peak", "total")}
    size, unit = (1, "seconds") if time["total"] >= 1 else (1e3, "milliseconds")
    numbers = enumerate(parts.items(), 1)  # of colours
    stack = [(f"c{number}", _name(name), size * value) for number, (name, value) in numbers if value]
    bars = [
        _bar("this plan", _seconds(time["total"]), stack),
        _bar("at the peak", _seconds(time["at_peak"]), [("c1", "at the peak", size * time["at_peak"])]),
    ]
    hidden = time["communication"] - time["exposed_communication"]
    return {"parts": parts, "axis": linear_axis(unit, 1.03 * size * time["total"]), "bars": bars, "hidden": hidden}


def _scaling(answer: dict[str, Any]) -> dict[str, Any] | None:
    scale = answer["scale"]
    if not scale:
        return None
    curves = {
        kind: [(row["num_devices"], row[kind]["samples_per_second"]) for row in scale["rows"] if row[kind]]
        for kind in ("strong", "weak")
    }
    first, speed = curves["strong"][0]
    counts = [row["num_devices"] for row in scale["rows"]]
    ideal = [(count, speed * count / first) for count in (first, counts[-1])]
    speeds = [value for curve in (*curves.values(), ideal) for _, value in curve]
    columns = ["samples/s", "per step", "efficiency", "waiting"]
    return {
        "curves": curves,
        "ideal": ideal,
        "x": _log("devices", counts[0], counts[-1], counts),
        "y": _log("samples per second", min(speeds), max(speeds)),
        "is_whole": all(row[kind] for row in scale["rows"] for kind in curves),
        "is_here": counts[0] <= answer["num_processes"] <= counts[-1],
        "columns": [f"{kind}: {column}" for kind in curves for column in columns],
        "rows": [(f"{row['num_devices']:,}", _speeds(row["strong"]) + _speeds(row["weak"])) for row in scale["rows"]],
    }


def _speeds(numbers: dict[str, Any] | None) -> list[str]:
    if numbers is None:
        return ["–"] * 4
    waiting = _percent(numbers["exposed_communication"] / numbers["seconds"])
    speed = _number(numbers["samples_per_second"])
    return [speed, _seconds(numbers["seconds"]), _percent(numbers["efficiency"]), waiting]


def _comparison(rows: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    """Compute the table of several hardware, the one of this page first; None: there is one only."""
    placed = [row for row in rows or [] if "problem" not in row]
    if not rows or len(rows) < 2:
        return None
    unit = "tokens" if any(row["tokens_per_second"] for row in placed) else "samples"
    is_by_cost = all(row["cost_per_million_samples"] is not None for row in placed)
    columns = {
        "to the end": lambda row: row["seconds_to_end"] and _duration(row["seconds_to_end"]),
        "dollars": lambda row: row["cost"] and _number(row["cost"]),
        "$ a billion tokens": lambda row: row["cost_per_billion_tokens"] and _number(row["cost_per_billion_tokens"]),
        f"{unit} per second": lambda row: _number(row[f"{unit}_per_second"]),
        "GB, needed of": lambda row: (
            f"{_number(row['memory_needed'] / 1e9)} of {_number(row['memory_of_device'] / 1e9)}"
        ),
        "b": lambda row: f"{row['per_device_train_batch_size']:,}",
        "k": lambda row: f"{row['gradient_accumulation_steps']:,}",
        "with": _options,
    }
    cells = {name: [write(row) for row in placed] for name, write in columns.items()}
    cells = {name: values for name, values in cells.items() if any(values)}
    if is_by_cost:
        label, lengths = "dollars for a million samples", [row["cost_per_million_samples"] for row in placed]
        notes = [f"${_number(value)}" for value in lengths]
    else:
        seconds = [1e6 / row["samples_per_second"] for row in placed]
        size, unit = next((size, unit) for size, unit in TIME_UNITS if max(seconds) >= size)
        label, lengths = f"{unit} for a million samples", [value / size for value in seconds]
        notes = [f"{_number(value)} {unit}" for value in lengths]
    bars = [
        _bar(_shorten(row["hardware"]), note, [("c2", label, length)], is_chosen=row is placed[0])
        for row, note, length in zip(placed, notes, lengths, strict=True)
    ]
    return {
        "columns": list(cells),
        "rows": [(row["hardware"], [values[i] for values in cells.values()]) for i, row in enumerate(placed)],
        "axis": linear_axis(label, 1.03 * max(lengths)),
        "bars": bars,
        "problems": [(row["hardware"], row["problem"]) for row in rows if "problem" in row],
    }


def _shorten(name: str) -> str:
    """Cut a name to what has room beside a bar."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def _options(row: dict[str, Any]) -> str:
    names = [row["mixed_precision"].replace("no", "float32")]
    names += ["checkpointing"] * row["gradient_checkpointing"] + ["sharded weights"] * row["sharded"]
    return ", ".join(names)


def _rate(answer: dict[str, Any]) -> dict[str, Any] | None:
    """Compute the chart of the learning rate; None: no schedule."""
    points = answer["learning_rates"]
    if not points:
        return None
    highest = max(rate for _, rate in points)
    exponent = math.floor(math.log10(highest)) if highest else 0
    x, warmup = linear_axis("optimizer step", points[-1][0], _short), answer["num_warmup_steps"]
    return {
        "x": x,
        "y": linear_axis(f"learning rate, × 10{str(exponent).translate(RAISED)}", 1.06 * highest / 10**exponent),
        "points": [(step, rate / 10**exponent) for step, rate in points],
        "highest": highest,
        "last": points[-1][1],
        "warmup": warmup if warmup and warmup <= x.high else None,
    }


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


def _log(label: str, low: float, high: float, values: Sequence[float] = ()) -> Axis:
    """Make a logarithmic axis from low to high, with ticks at `values`, or at round numbers from below low to above high."""
    if not values:
        values = list(itertools.takewhile(lambda value: value < 5 * high, _round_numbers(low / 5)))
        low, high = max(v for v in values if v <= low), min(v for v in values if v >= high)
        values = [v for v in values if low <= v <= high]
        tens = [v for v in values if f"{v:e}".startswith("1.0")]
        values = tens if len(tens) > 3 else values
    stride = -(-len(values) // 7)
    return Axis(label, low, high, [(value, _short(value)) for value in values[::stride]], is_log=True)


def _round_numbers(start: float) -> Iterable[float]:
    """Yield 1, 2 and 5 times the powers of ten, rising, from a number of at most `start` on."""
    for exponent in itertools.count(math.floor(math.log10(start))):
        yield from (float(f"{digit}e{exponent}") for digit in (1, 2, 5))


# -------------------------------------------------------------------------------------------------------------- numbers


def _number(value: float) -> str:
    """Write three significant digits, or all digits before the point.
    >>> [_number(value) for value in (0, 0.0123456, 1.5, 83.266, 152870.3)]
    ['0', '0.0123', '1.50', '83.3', '152,870']
    """
    if isinstance(value, int) or not value:
        return f"{value:,.0f}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def _count(value: float) -> str:
    """Write a count whole, a mean count with two digits.

    >>> _count(124439808), _count(2083.3333), _count(1000.0)
    ('124,439,808', '2,083.33', '1,000')
    """
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}".rstrip("0").rstrip(".")


def _percent(share: float) -> str:
    """Write a share of 1 as per cent.

    >>> _percent(0.5438), _percent(1)
    ('54.4 %', '100.0 %')
    """
    return f"{100 * share:.1f} %"


def _seconds(value: float) -> str:
    """Write seconds in s, ms or µs.

    >>> [_seconds(value) for value in (0, 2e-6, 0.0123, 3.97)]
    ['0 s', '2.00 µs', '12.3 ms', '3.97 s']
    """
    size, unit = next(((size, unit) for size, unit in ((1, "s"), (1e3, "ms")) if size * value >= 1), (1e6, "µs"))
    return f"{_number(size * value)} {unit}" if value else "0 s"


def _duration(seconds: float) -> str:
    """Write a duration in its two largest units.
    >>> [_duration(value) for value in (12.3, 3599.8, 5400, 254113)]
    ['12.3 s', '1 hour', '1 hour 30 minutes', '2 days 23 hours']
    """
    units = [("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1)]
    for (name, size), (small_name, small) in itertools.pairwise(units):
        count, rest = divmod(round(seconds / small), size // small)
        if count:
            return format_count(count, name) + (f" {format_count(rest, small_name)}" if rest else "")
    return _seconds(seconds)


def _bytes(num_bytes: float) -> str:
    """Write bytes in GB or MB, which are 1e9 and 1e6.

    >>> _bytes(96e9), _bytes(498e6)
    ('96.0 GB', '498 MB')
    """
    return f"{_number(num_bytes / 1e9)} GB" if num_bytes >= 1e9 else f"{_number(num_bytes / 1e6)} MB"


def _date(text: str) -> str:
    """Write a date and time as people do.

    >>> _date("2026-11-28T21:05")
    'Saturday 28 November 2026, 21:05'
    """
    moment = datetime.datetime.fromisoformat(text)
    return moment.strftime(f"%A {moment.day} %B %Y, %H:%M")


def _words(count: int) -> str:
    """Write a large count with millions and billions as words.

    >>> _words(1557611200), _words(110106428), _words(4200)
    ('1.56 billion', '110 million', '4,200')
    """
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{_number(count / size)} {name}"
    return f"{count:,}"


def _short(value: float) -> str:
    """Write the number of a tick, shortened where nothing is lost.

    >>> [_short(value) for value in (0, 0.5, 512, 1024, 200000.0, 1e6)]
    ['0', '0.5', '512', '1,024', '200k', '1M']
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size and value % (size / 10) == 0:
            return f"{value / size:g}{letter}"
    return f"{value:,g}" if value < 1 else f"{value:,.0f}"


def _name(key: str) -> str:
    return WORDS.get(key, key.replace("_", " "))
