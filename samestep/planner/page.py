"""A plan as one HTML page: what fits, what takes the time, how it grows, how to launch it. Needs nothing but itself.

Charts are SVG in two units: along the width per cent, so that they fit any screen, and in pixels what must stay readable.
"""

import dataclasses
import html
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

ROW = 46
"""Height of a bar and the space around it, in pixels."""
HEIGHT = 250
"""Height of a chart of curves, in pixels."""
BEYOND = 1.5
"""Bars are drawn up to so many times the device's memory; what is longer is cut off and marked."""
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
    """The page, complete: style and script inside, no address outside.

    Args:
        answer: what `python -m recipes plan RECIPE --on HARDWARE --json` prints, and `description` and `source`. A part of
            the page is left out where its key is missing or None: `micro_batches` (one bar is left), `learning_rates`,
            `scale`, `warnings` and single numbers.
    """
    answer = _escaped(answer)
    name = f"{answer['recipe']} on {answer['hardware']}"
    parts = [_headline, _warnings, _launch, _memory, _time, _scaling, _learning_rate, _settings]
    sections = "\n".join(section for part in parts if (section := part(answer)))
    script = f"<script>{SCRIPT}</script>" if answer["command"] is not None else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{name}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{sections}
</main>
{script}
</body>
</html>
"""


def _escaped(value: Any) -> Any:
    """A copy in which no text, of keys neither, is markup."""
    if isinstance(value, dict):
        return {_escaped(key): _escaped(of) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(of) for of in value]
    return html.escape(value) if isinstance(value, str) else value


# ------------------------------------------------------------------------------------------------------------- sections


def _headline(answer: dict) -> str:
    needed, there = answer["memory_needed"], answer["memory_of_device"]
    fits = needed <= there
    size = f"{_number(needed / 1e9)} of {_number(there / 1e9)} GB"
    end = ""
    if answer.get("seconds_to_end") is not None:
        steps = f"All {answer['num_steps']:,} steps take" if answer.get("num_steps") else "To the end it takes"
        end = f" {steps} {_duration(answer['seconds_to_end'])}."
    tiles = {
        "to the end": _optional(answer, "seconds_to_end", _duration),
        "per optimizer step": _seconds(answer["time"]["total"]),
        "samples per second": _number(answer["samples_per_second"]),
        "tokens per second": _optional(answer, "tokens_per_second", _number),
        "of the devices' peak": _percent(answer["share_of_peak"]),
        "memory needed, per device": size,
        "energy, at the power limit": _optional(answer, "energy_kwh", lambda value: f"{_number(value)} kWh"),
        "parameters": _words(answer["num_parameters"]),
    }
    numbers = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in tiles.items() if value)
    device = f" · {answer['device']}" if answer.get("device") else ""
    return f"""<header class="wide">
<p class="above">Training plan, predicted{device}</p>
<h1>{answer["recipe"]} <span>on {answer["hardware"]}</span></h1>
<p class="description">{answer["description"]}</p>
<p class="verdict"><strong class="{"fits" if fits else "too-much"}">{"✓ It fits" if fits else "✕ It does not fit"}</strong>
{size} with all margins. {_cut(answer)}{end}</p>
<dl class="tiles">{numbers}</dl>
</header>"""


def _cut(answer: dict) -> str:
    """How a step is divided, in a sentence."""
    n, shares, k = answer["num_processes"], answer["shares"], answer["gradient_accumulation_steps"]
    least, most = min(shares), max(shares)
    sizes = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    pieces = f"in {k:,} micro-steps of at most {answer['per_device_train_batch_size']:,}" if k > 1 else "in one forward"
    if n == 1:
        return f"One device computes the {sizes} samples of a step {pieces}."
    return f"{n:,} devices share the {answer['global_batch_size']:,} samples of a step: {sizes} each, {pieces}."


def _warnings(answer: dict) -> str:
    if not answer.get("warnings"):
        return ""
    items = "".join(f"<li>{warning}</li>" for warning in answer["warnings"])
    return (
        f'<section class="wide" id="warnings">\n<h2>Before you start</h2>\n<ul class="notes">{items}</ul>\n</section>'
    )


def _launch(answer: dict) -> str:
    if answer["command"] is None:
        sentence = "No script of this repository trains it yet."
        return f'<section class="wide" id="launch">\n<h2>Launch</h2>\n<p>{sentence}</p>\n</section>'
    words, file, missing = answer["command"].split(" "), "FILE.yaml", ""
    if file in words:
        missing = f"\n<p>{file} has to be written: add <code>--write_config {file}</code> to the plan's command.</p>"
    command = " ".join(f"<span>{word}</span>" for word in words)  # lines break between words only
    return f"""<section class="wide" id="launch">
<h2>Launch</h2>
<div class="command"><pre><code id="command">{command}</code></pre>
<button type="button" id="copy" hidden>Copy</button></div>
<p id="copied" role="status"></p>{missing}
</section>"""


def _memory(answer: dict) -> str:
    chosen, there = answer["per_device_train_batch_size"], answer["memory_of_device"]
    cuts = answer.get("micro_batches") or [
        {
            "per_device_train_batch_size": chosen,
            "gradient_accumulation_steps": answer["gradient_accumulation_steps"],
            "memory": answer["memory"],
            "needed": answer["memory_needed"],
            "fits": answer["memory_needed"] <= there,
            "seconds": answer["time"]["total"],
        }
    ]
    items = [item for item in answer["memory"] if item != "total"]
    used = {item: number for number, item in enumerate(items, 1) if any(cut["memory"][item] for cut in cuts)}
    bars, rows = [], []
    for cut in cuts:
        b, k = cut["per_device_train_batch_size"], cut["gradient_accumulation_steps"]
        parts = [(f"c{number}", _name(item), cut["memory"][item] / 1e9) for item, number in used.items()]
        parts.append(("band", "margin", (cut["needed"] - cut["memory"]["total"]) / 1e9))
        needed, sign = _number(cut["needed"] / 1e9), "✓" if cut["fits"] else "✕"
        is_chosen = b == chosen and len(cuts) > 1
        bars.append(_Bar(f"b {b:,}, k {k:,}", f"{sign} {needed} GB", parts, is_chosen))
        sizes = [_number(cut["memory"][item] / 1e9) for item in [*used, "total"]]
        seconds = "" if cut["seconds"] is None else _seconds(cut["seconds"])
        name = f"{b:,}{' (chosen)' if is_chosen else ''}"
        rows.append([name, f"{k:,}", *sizes, needed, "yes" if cut["fits"] else "no", seconds])
    longest = max(cut["needed"] for cut in cuts)
    axis = _linear("GB (1e9 bytes)", min(1.03 * max(longest, there), BEYOND * there) / 1e9)
    legend = [(_swatch(f"c{number}"), _name(item)) for item, number in used.items()]
    legend += [(_swatch("band"), "margin: what the plan may miss, and what is left alone")]
    legend += [(_line("limit"), f"the device has {_number(there / 1e9)} GB")]
    legend += [("▸", "chosen")] if len(cuts) > 1 else []
    head = ["b", "k", *(f"{_name(item)}, GB" for item in used), "planned, GB", "needed, GB", "fits", "per step"]
    return _section(
        "memory",
        "Memory of one device",
        "At the fullest moment of a step, by the micro-batch: b samples in a forward, k micro-steps.",
        _bars("Planned memory by micro-batch, stacked by what needs it", axis, bars, there / 1e9),
        legend,
        _table(head, rows),
    )


def _time(answer: dict) -> str:
    time = answer["time"]
    parts = {name: of for name, of in time.items() if name not in ("communication", "at_peak", "total")}
    size, unit = (1, "seconds") if time["total"] >= 1 else (1e3, "milliseconds")
    stack = [(f"c{number}", _name(name), size * of) for number, (name, of) in enumerate(parts.items(), 1) if of]
    peak = [("c1", "at the peak", size * time["at_peak"])]
    bars = [
        _Bar("this plan", _seconds(time["total"]), stack, False),
        _Bar("at the peak", _seconds(time["at_peak"]), peak, False),
    ]
    rows = [
        [f"{_swatch(f'c{number}')} {_name(name)}", _seconds(of), _percent(of / time["total"])]
        for number, (name, of) in enumerate(parts.items(), 1)
    ]
    rows.append(["in all", _seconds(time["total"]), _percent(1)])
    padding = ", padding counted" if answer.get("tokens_per_second") else ""
    hidden = time["communication"] - time["exposed_communication"]
    said = f" Communication takes {_seconds(time['communication'])}, {_seconds(hidden)} of it behind the computation."
    return f"""<section id="time">
<h2>Time of a step</h2>
<p>Predicted without --torch_compile{padding}; evaluations and saving come on top.
{said if time["communication"] else ""}</p>
{_bars("Seconds of one optimizer step, stacked by what takes them", _linear(unit, 1.03 * size * time["total"]), bars)}
{_table(["", "time", "share"], rows)}
</section>"""


def _scaling(answer: dict) -> str:
    scale = answer.get("scale")
    if not scale:
        return ""
    curves = {
        kind: [(row["num_devices"], row[kind]["samples_per_second"]) for row in scale["rows"] if row[kind]]
        for kind in ("strong", "weak")
    }
    first, speed = curves["strong"][0]
    counts = [row["num_devices"] for row in scale["rows"]]
    ideal = [(count, speed * count / first) for count in (first, counts[-1])]
    speeds = [of for curve in (*curves.values(), ideal) for _, of in curve]
    x = _log("devices", counts[0], counts[-1], counts)
    y = _log("samples per second", min(speeds), max(speeds))
    drawn = _curve("ideal", x, y, ideal)
    for kind, points in curves.items():
        drawn += _curve(kind, x, y, points) + _points(kind, x, y, points)
    is_whole = all(row[kind] for row in scale["rows"] for kind in curves)
    missing = "" if is_whole else " What is missing does not fit, or leaves devices without a sample."
    legend = [
        (_line("strong"), f"strong: the same {answer['global_batch_size']:,} samples in a step"),
        (_line("weak"), "weak: a step that grows with the devices"),
        (_line("ideal"), "ideal: each device as fast as at the first point"),
    ]
    if counts[0] <= answer["num_processes"] <= counts[-1]:
        drawn = _across(x, answer["num_processes"]) + drawn
        legend.append((_line("here"), f"this plan: {_plural(answer['num_processes'], 'device')}"))
    rows = [[f"{row['num_devices']:,}", *_speeds(row["strong"]), *_speeds(row["weak"])] for row in scale["rows"]]
    columns = ["samples/s", "per step", "efficiency", "waiting"]
    head = ["devices", *(f"{kind}: {column}" for kind in curves for column in columns)]
    remarks = "".join(f"<li>{remark}</li>" for remark in scale["remarks"])
    return _section(
        "scaling",
        "More devices",
        f"From {counts[0]:,} to {counts[-1]:,} devices ({scale['device']}). Both axes are logarithmic.{missing}",
        _chart("Samples per second against the number of devices", x, y, drawn),
        legend,
        _table(head, rows),
        f'<ul class="remarks">{remarks}</ul>' if remarks else "",
    )


def _speeds(numbers: dict | None) -> list[str]:
    if numbers is None:
        return ["–"] * 4
    waiting = _percent(numbers["exposed_communication"] / numbers["seconds"])
    speed = _number(numbers["samples_per_second"])
    return [speed, _seconds(numbers["seconds"]), _percent(numbers["efficiency"]), waiting]


def _learning_rate(answer: dict) -> str:
    points = answer.get("learning_rates")
    if not points:
        return ""
    highest = max(rate for _, rate in points)
    exponent = math.floor(math.log10(highest)) if highest else 0
    x = _linear("optimizer step", points[-1][0], _short)
    y = _linear(f"learning rate, × 10{str(exponent).translate(RAISED)}", 1.06 * highest / 10**exponent)
    scaled = [(step, rate / 10**exponent) for step, rate in points]
    drawn, warmup, said = _curve("strong", x, y, scaled), answer.get("num_warmup_steps"), ""
    legend = [(_line("strong"), "learning rate of the update that follows so many steps")]
    if warmup and warmup <= x.high:
        drawn, said = _across(x, warmup) + drawn, f", after {_plural(warmup, 'step')} of warm-up"
        legend.append((_line("here"), "end of the warm-up"))
    return _section(
        "learning-rate",
        "Learning rate",
        f"Its peak is {highest:.6g}{said}; it ends at {points[-1][1]:.3g}.",
        _chart("Learning rate over the optimizer steps", x, y, drawn),
        legend,
        _table(["step", "learning rate"], [[f"{step:,}", f"{rate:.4g}"] for step, rate in points]),
    )


def _settings(answer: dict) -> str:
    rates = ("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "warmup_epochs")
    counts = ("num_steps", "num_warmup_steps", "steps_per_epoch", "global_batch_size", "num_processes")
    cut = ("per_device_train_batch_size", "gradient_accumulation_steps")
    rows = [[key, f"{answer[key]:.6g}"] for key in rates if answer.get(key) is not None]
    rows += [[key, f"{answer[key]:,}"] for key in (*counts, *cut) if answer.get(key) is not None]
    rows += [["mixed_precision", answer["mixed_precision"]]]
    rows += [[key, "yes" if answer[key] else "no"] for key in ("gradient_checkpointing", "sharded")]
    rows += [
        ["parameters", f"{answer['num_parameters']:,}"],
        ["weights, gradients between micro-steps and moments", f"{_number(answer['states'] / 1e9)} GB in float32"],
        ["computed for a sample", f"{answer['flops_per_sample'] / 1e9:,.1f} GFLOP"],
    ]
    pairs = "".join(f"<div><dt>{key}</dt><dd>{value}</dd></div>" for key, value in rows)
    expect = f"\n<p><b>What to expect:</b> {answer['expect']}</p>" if answer.get("expect") else ""
    return f"""<section class="wide" id="settings">
<h2>The step</h2>
<p><b>Strategy:</b> {answer["strategy"]}; {answer["reason"]}.</p>
<dl class="pairs">{pairs}</dl>
<p><b>Where the numbers are from:</b> {answer["source"]}</p>{expect}
</section>"""


# --------------------------------------------------------------------------------------------------------------- charts


@dataclasses.dataclass(frozen=True)
class _Axis:
    """From low to high; ticks are (value, text)."""

    label: str
    low: float
    high: float
    ticks: list[tuple[float, str]]
    is_log: bool = False

    def at(self, value: float) -> float:
        """Per cent of the way from low to high."""
        ends = low, high = self.low, self.high
        if self.is_log:
            value, low, high = (math.log(of) for of in (value, *ends))
        return 100 * (value - low) / (high - low) if high > low else 50.0


def _linear(label: str, high: float, text: Callable[[float], str] | None = None) -> _Axis:
    """From 0, with a tick for at most five steps of 1, 2 or 5 times a power of ten."""
    high = high or 1.0
    step = next(step for step in _round_numbers(high / 10) if step >= high / 5)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    values = [number * step for number in range(6) if number * step <= high * (1 + 1e-9)]
    return _Axis(label, 0.0, high, [(value, text(value) if text else f"{value:,.{digits}f}") for value in values])


def _log(label: str, low: float, high: float, values: Sequence[float] = ()) -> _Axis:
    """From low to high, with ticks at `values`, or else at round numbers, one below and one above included."""
    if not values:
        values = list(itertools.takewhile(lambda value: value < 5 * high, _round_numbers(low / 5)))
        low, high = max(of for of in values if of <= low), min(of for of in values if of >= high)
        values = [of for of in values if low <= of <= high]
        tens = [of for of in values if f"{of:e}".startswith("1.0")]
        values = tens if len(tens) > 3 else values
    every = -(-len(values) // 7)
    return _Axis(label, low, high, [(value, _short(value)) for value in values[::every]], is_log=True)


def _round_numbers(start: float) -> Iterable[float]:
    """1, 2 and 5 times the powers of ten, rising, from at most `start` on."""
    for exponent in itertools.count(math.floor(math.log10(start))):
        yield from (float(f"{digit}e{exponent}") for digit in (1, 2, 5))


@dataclasses.dataclass(frozen=True)
class _Bar:
    """One row: parts are (class of its colour, name, value), drawn one after the other."""

    name: str
    note: str
    parts: list[tuple[str, str, float]]
    is_chosen: bool


def _bars(title: str, axis: _Axis, bars: list[_Bar], limit: float | None = None) -> str:
    height, drawn = ROW * len(bars), []
    drawn += [
        f'<line class="grid" x1="{axis.at(v):.3f}%" x2="{axis.at(v):.3f}%" y2="{height}"/>' for v, _ in axis.ticks
    ]
    for number, bar in enumerate(bars):
        y, start, rects = ROW * number, 0.0, ""
        for kind, name, value in bar.parts:
            rects += (
                f'<rect class="{kind}" x="{axis.at(start):.4f}%" y="1" width="{axis.at(value):.4f}%" height="24">'
                f"<title>{name}: {_number(value)} {axis.label}</title></rect>"
            )
            start += value
        drawn.append(
            f'<g class="bar{" chosen" if bar.is_chosen else ""}">'
            f'<text class="name" x="-100" y="{y + 21}">{"▸ " if bar.is_chosen else ""}{bar.name}</text>'
            f'<text class="note" x="-100" y="{y + 36}">{bar.note}</text>'
            f'<svg y="{y + 10}" width="100%" height="26">{rects}</svg>'
            + (f'<text class="more" x="100%" dx="4" y="{y + 28}">→</text>' if start > axis.high * 1.000001 else "")
            + "</g>"
        )
    if limit is not None:
        x = axis.at(limit)
        drawn.append(f'<line class="limit" x1="{x:.4f}%" x2="{x:.4f}%" y1="-2" y2="{height}"/>')
    drawn += [f'<text class="tick" x="{axis.at(v):.3f}%" y="{height + 18}">{text}</text>' for v, text in axis.ticks]
    drawn.append(f'<text class="x-label" x="100%" y="{height + 36}">{axis.label}</text>')
    return f'<svg class="chart bars" role="img" height="{height}"><title>{title}</title>{"".join(drawn)}</svg>'


def _chart(title: str, x: _Axis, y: _Axis, drawn: str) -> str:
    lines = "".join(
        f'<line class="grid" x2="100%" y1="{100 - y.at(v):.3f}%" y2="{100 - y.at(v):.3f}%"/>'
        f'<text class="y-tick" x="-8" y="{100 - y.at(v):.3f}%" dy="4">{text}</text>'
        for v, text in y.ticks
    )
    lines += "".join(f'<text class="tick" x="{x.at(v):.3f}%" y="{HEIGHT + 18}">{text}</text>' for v, text in x.ticks)
    labels = f'<text class="x-label" x="100%" y="{HEIGHT + 36}">{x.label}</text><text x="-48" y="-14">{y.label}</text>'
    return f'<svg class="chart curves" role="img" height="{HEIGHT}"><title>{title}</title>{lines}{drawn}{labels}</svg>'


def _curve(kind: str, x: _Axis, y: _Axis, points: list) -> str:
    """A line through (x, y), stretched with the chart but not in its width."""
    places = " ".join(f"{x.at(a):.3f},{100 - y.at(b):.3f}" for a, b in points)
    stretched = 'width="100%" height="100%" viewBox="0 0 100 100" preserveAspectRatio="none" overflow="visible"'
    return f'<svg {stretched}><polyline class="{kind}" points="{places}" vector-effect="non-scaling-stroke"/></svg>'


def _points(kind: str, x: _Axis, y: _Axis, points: list) -> str:
    return "".join(
        f'<circle class="{kind}" cx="{x.at(a):.3f}%" cy="{100 - y.at(b):.3f}%" r="{4 if kind == "strong" else 2.5}">'
        f"<title>{_number(a)} {x.label}: {_number(b)} {y.label}</title></circle>"
        for a, b in points
    )


def _across(x: _Axis, value: float) -> str:
    """A line over the whole height."""
    return f'<line class="here" x1="{x.at(value):.3f}%" x2="{x.at(value):.3f}%" y2="100%"/>'


def _swatch(kind: str) -> str:
    return f'<svg class="key" width="12" height="12" aria-hidden="true"><rect class="{kind}" width="12" height="12"/></svg>'


def _line(kind: str) -> str:
    line = f'<line class="{kind}" x1="0" x2="24" y1="6" y2="6"/>'
    point = f'<circle class="{kind}" cx="12" cy="6" r="{4 if kind == "strong" else 2.5}"/>' if kind == "weak" else ""
    return f'<svg class="key" width="24" height="12" aria-hidden="true">{line}{point}</svg>'


def _section(name: str, title: str, said: str, chart: str, legend: list, table: str, more: str = "") -> str:
    entries = "".join(f"<li>{key} {text}</li>" for key, text in legend)
    return f"""<section id="{name}">
<h2>{title}</h2>
<p>{said}</p>
{chart}
<ul class="legend">{entries}</ul>
{more}
<details><summary>The numbers</summary>{table}</details>
</section>"""


def _table(head: list[str], rows: list[list[str]]) -> str:
    titles = "".join(f'<th scope="col">{title}</th>' for title in head)
    lines = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>' for first, *rest in rows
    )
    body = f"<table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="table">{body}</div>'


# -------------------------------------------------------------------------------------------------------------- numbers


def _number(value: float) -> str:
    """Three digits that count, or all before the point.

    >>> [_number(value) for value in (0, 0.0123456, 1.5, 83.266, 152870.3)]
    ['0', '0.0123', '1.50', '83.3', '152,870']
    """
    if isinstance(value, int) or not value:
        return f"{value:,.0f}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def _percent(share: float) -> str:
    """
    >>> _percent(0.5438), _percent(1)
    ('54.4 %', '100.0 %')
    """
    return f"{100 * share:.1f} %"


def _seconds(value: float) -> str:
    """
    >>> [_seconds(value) for value in (0, 2e-6, 0.0123, 3.97)]
    ['0 s', '2.00 µs', '12.3 ms', '3.97 s']
    """
    size, unit = next(((size, unit) for size, unit in ((1, "s"), (1e3, "ms")) if size * value >= 1), (1e6, "µs"))
    return f"{_number(size * value)} {unit}" if value else "0 s"


def _duration(seconds: float) -> str:
    """In two units.

    >>> [_duration(value) for value in (12.3, 3599.8, 5400, 254113)]
    ['12.3 s', '1 hour', '1 hour 30 minutes', '2 days 23 hours']
    """
    units = [("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1)]
    for (name, size), (small_name, small) in itertools.pairwise(units):
        count, rest = divmod(round(seconds / small), size // small)
        if count:
            return _plural(count, name) + (f" {_plural(rest, small_name)}" if rest else "")
    return _seconds(seconds)


def _plural(count: int, name: str) -> str:
    return f"{count:,} {name}{'s' if count != 1 else ''}"


def _words(count: int) -> str:
    """
    >>> _words(1557611200), _words(110106428), _words(4200)
    ('1.56 billion', '110 million', '4,200')
    """
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{_number(count / size)} {name}"
    return f"{count:,}"


def _short(value: float) -> str:
    """
    >>> [_short(value) for value in (0, 0.5, 512, 1024, 200000.0, 1e6)]
    ['0', '0.5', '512', '1,024', '200k', '1M']
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size and value % (size / 10) == 0:
            return f"{value / size:g}{letter}"
    return f"{value:,g}" if value < 1 else f"{value:,.0f}"


def _name(key: str) -> str:
    return WORDS.get(key, key.replace("_", " "))


def _optional(answer: dict, key: str, text: Callable[[float], str]) -> str | None:
    return None if answer.get(key) is None else text(answer[key])


RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; --page: #fcfcfb; --text: #1c2127; --soft: #5a636e; --rule: #e2e4e7; --box: #f2f3f4;
  --accent: #0b5394; --c1: #0b4f8a; --c2: #3f8ccb; --c3: #a5cdee; --c4: #0f7f6d; --c5: #6cc29a; --c6: #d0690b;
  --c7: #f6c177; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --text: #e6e8eb; --soft: #a0a8b2; --rule: #2c3138;
  --box: #1e2228; --accent: #7dbcf2; --c1: #2f7cc4; --c2: #6fb0ea; --c3: #c3e0f8; --c4: #14907c; --c5: #8edccb;
  --c6: #e07f22; --c7: #f9cf95; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", sans-serif; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
main { max-width: 1120px; margin: 0 auto; padding: 48px 16px 80px; display: grid; gap: 56px 72px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
.wide { grid-column: 1 / -1; }
h1 { font-size: clamp(1.8rem, 5vw, 2.8rem); line-height: 1.15; letter-spacing: -0.02em; margin: 0 0 12px; }
h1 span { color: var(--soft); font-weight: 400; }
h2 { font-size: 1.2rem; letter-spacing: -0.01em; margin: 0 0 4px; }
p { margin: 0 0 16px; max-width: 72ch; text-wrap: pretty; }
section > p { color: var(--soft); font-size: 0.94rem; }
section > p b { color: var(--text); font-weight: 600; }
.above { color: var(--accent); font-size: 0.86rem; font-weight: 600; margin-bottom: 8px; }
.description { color: var(--soft); }
.verdict { font-size: 1.15rem; }
.verdict strong { display: inline-block; color: var(--page); border-radius: 6px; padding: 0 10px; margin-right: 6px;
  font-size: 1rem; }
.fits { background: var(--c4); }
.verdict .too-much { background: var(--c7); color: #1c2127; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(max(132px, 22%), 1fr)); gap: 24px 16px;
  margin: 32px 0 0; padding: 24px 0; border: solid var(--rule); border-width: 1px 0; }
.tiles div { display: flex; flex-direction: column-reverse; justify-content: flex-end; }
.tiles dt, .pairs dt { color: var(--soft); font-size: 0.84rem; }
.tiles dd { margin: 0; font-size: 1.3rem; font-weight: 600; line-height: 1.3; letter-spacing: -0.01em; }
.notes { margin: 8px 0 16px; padding: 0; list-style: none; font-size: 0.94rem; }
.notes li { border-left: 3px solid var(--c6); padding: 2px 0 2px 14px; margin-bottom: 10px; }
.remarks { margin: 0 0 12px; padding-left: 18px; font-size: 0.9rem; color: var(--soft); }
.remarks li { margin-bottom: 4px; }
.command { display: flex; flex-wrap: wrap; gap: 12px; align-items: flex-start; background: var(--box); border-radius: 10px;
  padding: 14px 14px 14px 18px; margin-top: 12px; }
.command pre { flex: 1 1 240px; min-width: 0; margin: 4px 0; white-space: pre-wrap; }
.command span { display: inline-block; max-width: 100%; }
p code { white-space: nowrap; }
code { font: 0.9rem/1.6 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
button { font: inherit; font-size: 0.9rem; font-weight: 600; min-height: 40px; padding: 0 16px; cursor: pointer;
  border: 0; border-radius: 7px; background: var(--accent); color: var(--page); }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
#copied { min-height: 1.5em; margin: 6px 0 0; }
.chart { display: block; overflow: visible; font-size: 12px; fill: var(--soft); stroke-width: 0; }
.bars { width: calc(100% - 118px); margin: 12px 18px 52px 100px; }
.curves { width: calc(100% - 64px); margin: 40px 16px 56px 48px; }
.tick { text-anchor: middle; }
.y-tick, .x-label { text-anchor: end; }
.name { fill: var(--text); font-size: 13px; }
.chosen .name { font-weight: 700; fill: var(--accent); }
.note { font-size: 11px; }
line, polyline { fill: none; stroke-width: 2; }
rect { shape-rendering: crispEdges; }
.grid { stroke: var(--rule); stroke-width: 1; }
.limit { stroke: var(--text); stroke-dasharray: 5 4; }
.here { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 1.5 4; }
.strong { stroke: var(--c2); fill: none; stroke-width: 2.5; }
.weak { stroke: var(--c6); fill: none; }
circle.strong { fill: var(--page); }
circle.weak { fill: var(--c6); }
.ideal { stroke: var(--soft); stroke-dasharray: 7 5; stroke-width: 1.5; }
.c1 { fill: var(--c1); } .c2 { fill: var(--c2); } .c3 { fill: var(--c3); } .c4 { fill: var(--c4); }
.c5 { fill: var(--c5); } .c6 { fill: var(--c6); } .c7 { fill: var(--c7); }
.band { fill: none; stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 2; shape-rendering: auto; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0 0 16px; padding: 0; list-style: none;
  font-size: 0.86rem; color: var(--soft); }
.key { overflow: visible; vertical-align: -1px; margin-right: 4px; }
summary { cursor: pointer; color: var(--accent); font-size: 0.9rem; padding: 6px 0; }
.scroll { overflow: auto; max-height: 380px; }
table { border-collapse: collapse; font-size: 0.88rem; width: 100%; }
th, td { text-align: right; padding: 6px 0 6px 16px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { font-weight: 400; }
#time tbody th { white-space: normal; }
th:first-child { text-align: left; padding-left: 0; }
tbody th { position: sticky; left: 0; background: var(--page); }
thead th { color: var(--soft); position: sticky; top: 0; background: var(--page); }
#time tbody tr:last-child > * { font-weight: 600; border-bottom: 0; }
.pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 230px), 1fr)); gap: 14px 24px;
  margin: 20px 0 24px; }
.pairs dd { margin: 0; }
"""
SCRIPT = """
const button = document.getElementById("copy"), command = document.getElementById("command");
button.hidden = false;
button.addEventListener("click", async () => {
  let isCopied = true;
  try {
    await navigator.clipboard.writeText(command.textContent);
  } catch { /* not allowed, or not there: select it, and ask the browser in the older way */
    getSelection().selectAllChildren(command);
    isCopied = document.execCommand("copy");
  }
  document.getElementById("copied").textContent = isCopied ? "Copied." : "Selected: press Ctrl+C or ⌘C to copy.";
});
"""
