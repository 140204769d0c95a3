"""A plan as one HTML page that needs no other file: memory, time, scaling, the learning rate, and the command that launches it.

And what fits on some hardware, as such a page. The templates in templates/, for Jinja, decide how it looks: page.html.j2 and
fits.html.j2, their frame, charts, style and script. This module computes the values that they show.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samestep.pages import (
    format_duration,
    format_number,
    format_percent,
    format_seconds,
    format_tick,
    linear_axis,
    log_axis,
    make_environment,
)

TEMPLATES = Path(__file__).parent / "templates"
LONGEST_BAR = 1.5
"""Largest length of a bar, in memories of the device; longer bars are cut off and marked."""
LONGEST_NAME = 17
"""Characters of a hardware's name beside a bar."""
TIME_UNITS = ((3600, "hours"), (60, "minutes"), (0, "seconds"))
OPTIONAL = """
    learning_rate muon_learning_rate adam_beta1 adam_beta2 adam_epsilon warmup_epochs num_steps num_warmup_steps
    steps_per_epoch energy_kwh tokens_per_second seconds_to_end seconds_to_end_range cost cost_range cost_per_epoch
    cost_per_billion_tokens is_adapter start end write_command job_command disk_bytes data_bytes download_bytes host_memory
    host_memory_why memory_of_host
    checkpoint_bytes model_bytes checkpoint_seconds checkpointing_seconds interruption_seconds interruption_cost
    interruptions_per_day seconds_with_interruptions cost_with_interruptions micro_batches learning_rates scale rows
    warnings notes unverified device expect hint
""".split()
"""Keys of an answer that may be missing."""
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
WORDS = {
    "products": "matrix products",
    "attention": "fused attention",
    "memory_traffic": "memory traffic between them",
    "weights": "reading and casting weights",
    "launches": "starting kernels",
    "stragglers": "waiting for the slowest device",
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
    environment = _make_environment()
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
    page: str = _make_environment().get_template("fits.html.j2").render(answer=answer, **values)
    return page


def _make_environment() -> Any:
    environment = make_environment(TEMPLATES)
    environment.filters["name"] = _name
    return environment


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
        need, is_chosen = format_number(cut["needed"] / 1e9), b == own_size and len(cuts) > 1
        bars.append(_bar(f"b {b:,}, k {k:,}", f"{'✓' if cut['fits'] else '✕'} {need} GB", parts, is_chosen))
        sizes = [format_number(cut["memory"][item] / 1e9) for item in [*item_numbers, "total"]]
        seconds = "" if cut["seconds"] is None else format_seconds(cut["seconds"])
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
        _bar("this plan", format_seconds(time["total"]), stack),
        _bar("at the peak", format_seconds(time["at_peak"]), [("c1", "at the peak", size * time["at_peak"])]),
    ]
    hidden = time["communication"] - time["exposed_communication"]
    return {
        "parts": parts,
        "axis": linear_axis(unit, 1.03 * size * time["total"]),
        "bars": bars,
        "hidden": hidden,
    }


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
        "x": log_axis("devices", counts[0], counts[-1], counts),
        "y": log_axis("samples per second", min(speeds), max(speeds)),
        "is_whole": all(row[kind] for row in scale["rows"] for kind in curves),
        "is_here": counts[0] <= answer["num_processes"] <= counts[-1],
        "columns": [f"{kind}: {column}" for kind in curves for column in columns],
        "rows": [(f"{row['num_devices']:,}", _speeds(row["strong"]) + _speeds(row["weak"])) for row in scale["rows"]],
    }


def _speeds(numbers: dict[str, Any] | None) -> list[str]:
    if numbers is None:
        return ["–"] * 4
    waiting = format_percent(numbers["exposed_communication"] / numbers["seconds"])
    speed = format_number(numbers["samples_per_second"])
    return [speed, format_seconds(numbers["seconds"]), format_percent(numbers["efficiency"]), waiting]


def _comparison(rows: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    """Compute the table of several hardware, the one of this page first; None: there is one only."""
    placed = [row for row in rows or [] if "problem" not in row]
    if not rows or len(rows) < 2:
        return None
    unit = "tokens" if any(row["tokens_per_second"] for row in placed) else "samples"
    is_by_cost = all(row["cost_per_million_samples"] is not None for row in placed)
    columns = {
        "to the end": lambda row: row["seconds_to_end"] and format_duration(row["seconds_to_end"]),
        "dollars": lambda row: row["cost"] and format_number(row["cost"]),
        "$ a billion tokens": lambda row: (
            row["cost_per_billion_tokens"] and format_number(row["cost_per_billion_tokens"])
        ),
        f"{unit} per second": lambda row: format_number(row[f"{unit}_per_second"]),
        "GB, needed of": lambda row: (
            f"{format_number(row['memory_needed'] / 1e9)} of {format_number(row['memory_of_device'] / 1e9)}"
        ),
        "b": lambda row: f"{row['per_device_train_batch_size']:,}",
        "k": lambda row: f"{row['gradient_accumulation_steps']:,}",
        "with": _options,
    }
    cells = {name: [write(row) for row in placed] for name, write in columns.items()}
    cells = {name: values for name, values in cells.items() if any(values)}
    if is_by_cost:
        label, lengths = "dollars for a million samples", [row["cost_per_million_samples"] for row in placed]
        notes = [f"${format_number(value)}" for value in lengths]
    else:
        seconds = [1e6 / row["samples_per_second"] for row in placed]
        size, unit = next((size, unit) for size, unit in TIME_UNITS if max(seconds) >= size)
        label, lengths = f"{unit} for a million samples", [value / size for value in seconds]
        notes = [f"{format_number(value)} {unit}" for value in lengths]
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
    x, warmup = linear_axis("optimizer step", points[-1][0], format_tick), answer["num_warmup_steps"]
    return {
        "x": x,
        "y": linear_axis(f"learning rate, × 10{str(exponent).translate(RAISED)}", 1.06 * highest / 10**exponent),
        "points": [(step, rate / 10**exponent) for step, rate in points],
        "highest": highest,
        "last": points[-1][1],
        "warmup": warmup if warmup and warmup <= x.high else None,
    }


def _name(key: str) -> str:
    return WORDS.get(key, key.replace("_", " "))
