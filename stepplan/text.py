"""The answers of `plan` and `scale` as lines of text."""

import datetime
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from samestep.cut.layout import Layout
from samestep.printing import describe_sizes, line_width, round_number, wrap
from samestep.recipe.reading import is_installed
from samestep.recipe.recipe import explain_accumulation
from stepplan.costs import KEPT_CHECKPOINTS, RESTART_SECONDS, find_end
from stepplan.image_text import describe_images
from stepplan.placement import BAND, RESERVED

OPTIMIZER = ("learning_rate", "muon_learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "warmup_epochs")
NOT_IN_TOTAL = ("total", "communication", "at_peak")  # of a step's time
WORTH_SAYING = 0.02
"""Share of the time that saving takes, from which on it is said."""
LARGE_HOST = 2e12
"""Bytes of memory that few machines have, so that a plan that needs them says so where that of a machine is not known."""
SHORT = 3600
"""Seconds of a training of which neither the day it ends nor interruptions are said."""
WIDTH = 100
"""Columns of a line, if its words allow it; fewer on a narrower terminal."""
WIDEST, NARROW, GOES_ON = 1000, 122, "    "
"""Columns of a table that is no terminal's; those that both tables of `scale` need beside each other; what begins a line
with the other columns of a row."""


def write_plan(answer: dict[str, Any]) -> Iterator[str]:
    """Write the lines of `plan` from its JSON object: on hardware first what it costs, how it is launched and what to know."""
    if "hardware" in answer:
        yield from _write_verdict(answer)
        yield from ("", "Details")
    yield from _wrap(f"{answer['title']}: {answer['description']}", indent=13 * " ")
    yield from (line for name, text in _list_details(answer) for line in _wrap(f"  {name:10} {text}", indent=13 * " "))
    if "hardware" not in answer:
        yield "With --on HARDWARE (8xh100) it says what fits there, how long that takes, and how to launch it."


def _wrap(text: str, indent: str = "") -> list[str]:
    return wrap(text, line_width(WIDTH), indent)


def _write_verdict(answer: dict[str, Any]) -> Iterator[str]:
    """Write what fits, hours and dollars, the command, and what to know before the start."""
    yield from _wrap(f"{answer['title']} on {answer['hardware']}: {answer['device']}")
    for name, text in _list_verdict(answer):
        yield from _wrap(f"  {name:10} {text}", indent=13 * " ")
    yield from ("", "Launch")
    if answer["write_command"]:
        yield from _wrap_command(answer["write_command"])
    command = answer["command"]
    if command:
        yield from _wrap_command(command)
    else:
        yield from _wrap(f"  {answer['hint']}", indent="  ")
    if command and answer.get("job_command"):
        yield "  or, as a job for Slurm (other engines: samestep launch --help)"
        yield from _wrap_command(answer["job_command"])
    if command and is_installed():
        yield "  scripts/ is in the repository, not in the installed package: run it from a checkout"
    remarks = [*answer["warnings"], *answer["notes"]]
    if remarks:
        yield from ("", "Before the start")
    for remark in remarks:
        yield from _wrap(f"  - {remark}", indent="    ")


def _list_verdict(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """List what a plan on hardware is asked for, each under the word for it: fits, step, time, rows, ends, cost,
    machine, stops, how sure."""
    needed, there = answer["memory_needed"], answer["memory_of_device"]
    fits = "yes" if needed <= there else "NO"
    if _is_host_short(answer) and needed <= there:
        fits = "the devices, but NOT the hosts"
    names = {"gradient_checkpointing": "gradient checkpointing", "sharded": "sharded weights"}
    if answer["num_shards"] is not None:
        names["sharded"] = f"weights sharded over the {answer['num_shards']} devices of a node (HSDP)"
    options = " and ".join(text for name, text in names.items() if answer[name])
    options = f", with {options}" if options else ""
    if needed <= there and answer["memory_of_host"] is None and answer["host_memory"] > LARGE_HOST:
        fits = (
            f"the devices; of the hosts it is not known, which need {_size(answer['host_memory'])} each (--host_memory)"
        )
    yield "fits", f"{fits}: {needed / 1e9:.1f} of {there / 1e9:.1f} GB on a device, margins included{options}"
    yield "step", _describe_step(answer)
    yield "time", _describe_duration(answer)
    if rows := _describe_rows(answer):
        yield "rows", rows
    if end := "" if answer["seconds_to_end"] is None else _describe_end(answer):
        yield "ends", end
    if cost := "; ".join(filter(None, [_describe_cost(answer), _describe_energy(answer)])):
        yield "cost", cost
    yield "machine", _describe_host(answer)
    if spot := _describe_spot(answer):
        yield "stops", spot
    yield "how sure", explain_band([answer])


def _describe_step(answer: dict[str, Any]) -> str:
    """Say how a step is cut between devices and into micro-batches."""
    n, b, k = (answer[name] for name in ("num_processes", "per_device_train_batch_size", "gradient_accumulation_steps"))
    least, most = (f"{function(answer['shares']):,}" for function in (min, max))
    sizes = most if least == most else f"{least} to {most}"
    devices, each = ("1 device", "") if n == 1 else (f"{n:,} devices", " each")
    pieces = "one forward" if k == 1 else f"{k:,} micro-batches of at most {b:,}"
    return f"{devices}, {sizes} samples{each} in {pieces}, in {answer['mixed_precision'].replace('no', 'float32')}"


def _is_host_short(answer: dict[str, Any]) -> bool:
    room = answer["memory_of_host"]
    return room is not None and answer["host_memory"] > room


def _describe_host(answer: dict[str, Any]) -> str:
    """Say what memory and room on the disk a machine needs, and whether it is known to have too little of the first."""
    room, disk = answer["memory_of_host"], answer["disk_bytes"] + answer["download_bytes"]
    there = f" of {_size(room)}" if room else ""
    return f"{_size(answer['host_memory'])}{there} of memory ({answer['host_memory_why']}); {_size(disk)} of disk"


def _describe_duration(answer: dict[str, Any]) -> str:
    """Say how long it takes, or what is missing to say it."""
    tokens = answer["tokens_per_second"]
    speed = f"{round_number(answer['samples_per_second'])} samples/s"
    speed += f", {round_number(tokens)} tokens/s" if tokens else ""
    if answer["seconds_to_end"] is None:
        return f"{_explain_missing(answer)}. {speed}"
    hours = format_range(answer["seconds_to_end"], *answer["seconds_to_end_range"])
    length = f"{answer['num_steps']:,} steps"
    length += f" ({round_number(answer['num_tokens'])} tokens)" if tokens else ""
    speed += " with the largest batch" if answer["batch_sizes"] is not None else ""
    likely, own = "", answer.get("of_mean_rows")
    if own and own["seconds_to_end"] and own["tokens"] < answer["tokens_per_step"] // answer["global_batch_size"]:
        size, unit = _choose_unit(own["seconds_to_end"])
        likely = f"about {round_number(own['seconds_to_end'] / size)} {unit} with rows as long as yours; at most "
    return f"{likely}{hours} for {length}: {speed}"


def _describe_rows(answer: dict[str, Any]) -> str:
    """Say of how many rows an epoch is, where the rows of one's own files were counted, and how long each is taken to be."""
    rows = answer.get("train_rows")
    if not rows or rows["why"]:
        return ""
    held_out = f", of which {rows['num_held_out']:,} are held out" if rows["num_held_out"] else ""
    most = answer["tokens_per_step"] // answer["global_batch_size"]
    mean, num_long = rows["mean_tokens"], rows["num_long"]
    text = f"{rows['num_rows']:,} in the files{held_out}"
    if mean is not None and mean < most:
        text += f"; about {mean:,} tokens each, and at most {most:,} (max_seq_length)"
    else:
        text += f"; each is counted with the most tokens that it may have, {most:,} (max_seq_length)"
    if num_long:
        text += (
            f". About {num_long:,} are longer, and are left out: --max_seq_length {rows['longest_tokens']} keeps all, "
            "--truncation cut cuts them"
        )
    return text


def _describe_cost(answer: dict[str, Any]) -> str:
    """Say the dollars to the end, and those of an epoch and of a billion tokens; empty: no price is given."""
    if answer["cost"] is None:
        return ""
    low, high = answer["cost_range"]
    price = f"${answer['price_per_hour']:,.2f} for a device and hour"
    own = answer.get("of_mean_rows")
    likely = f"about ${_dollars(own['cost'])} with rows as long as yours; at most " if own and own["cost"] else ""
    parts = [f"{likely}${_dollars(answer['cost'])} (${_dollars(low)} to ${_dollars(high)}) at {price}"]
    epoch, billion = answer["cost_per_epoch"], answer["cost_per_billion_tokens"]
    parts += [] if epoch is None else [f"${_dollars(epoch)} an epoch"]
    parts += [] if billion is None else [f"${_dollars(billion)} a billion tokens"]
    return ", ".join(parts)


def _describe_energy(answer: dict[str, Any]) -> str:
    energy = answer["energy_kwh"]
    return f"{round_number(energy)} kWh at the power limit" if energy is not None and energy >= 0.01 else ""


def _describe_end(answer: dict[str, Any]) -> str:
    """Say the day on which it ends; without a start, if it starts now. Empty: within `SHORT`, or beyond calendars."""
    start, condition = answer["start"], ""
    if start is None and answer["seconds_to_end"] < SHORT:
        return ""
    if start is None:
        start, condition = datetime.datetime.now().isoformat(), " if it starts now"
    start = datetime.datetime.fromisoformat(start)
    ends = [find_end(start, seconds) for seconds in (answer["seconds_to_end"], *answer["seconds_to_end_range"])]
    if None in ends:
        return ""
    days = [format_day(end, start) for end in ends]
    if len({end.date() for end in ends}) == 1 and all(":" in day for day in days):  # the day is said once
        days[1:] = [f"{end:%H:%M}" for end in ends[1:]]
    return f"on {days[0]}{condition} ({' to '.join(days[1:])})"


def format_day(end: datetime.datetime, start: datetime.datetime) -> str:
    """Write a date: of the first two days with the time, of later years with the year.

    >>> start = datetime.datetime(2026, 11, 25, 17, 0)
    >>> [format_day(start + datetime.timedelta(days=days), start) for days in (0.25, 4, 100)]
    ['Wednesday 25 November 23:00', 'Sunday 29 November', 'Friday 5 March 2027']
    """
    clock = " %H:%M" if end - start < datetime.timedelta(days=2) else " %Y" if end.year != start.year else ""
    return end.strftime(f"%A {end.day} %B{clock}")


def _describe_spot(answer: dict[str, Any]) -> str:
    """Say what checkpoints and an interruption cost, and all of a day if their number is given; empty: within `SHORT`."""
    cost, seconds = answer["interruption_cost"], answer["seconds_to_end"]
    if seconds is not None and seconds < SHORT and answer["interruptions_per_day"] is None:
        return ""
    lost = format_seconds(answer["interruption_seconds"]) + ("" if cost is None else f" (${_dollars(cost)})")
    rate, stretched = answer["interruptions_per_day"], answer["seconds_with_interruptions"]
    every = format_seconds(answer["checkpointing_seconds"])
    saving, share = answer["checkpoint_seconds"], answer["checkpoint_seconds"] / answer["checkpointing_seconds"]
    text = (
        f"an interruption costs about {lost}: half of the {every} between checkpoints and {RESTART_SECONDS / 60:.0f} minutes "
        f"to start again (assumed); a checkpoint takes {format_seconds(saving)}"
    )
    if share > WORTH_SAYING:
        text += (
            f", and all of them {share:.0%} of the time, which is counted; --async_checkpointing writes them while training "
            "goes on"
        )
    if rate is None or seconds is None:
        return text + "."
    how_often = f"With {rate:g} interruption{'' if rate == 1 else 's'} a day"
    if stretched is None:
        return f"{text}. {how_often} nothing goes forward."
    total = answer["cost_with_interruptions"]
    dollars = "" if total is None else f", ${_dollars(total)}"
    minutes = answer["checkpointing_seconds"] / 60
    return (
        f"{text}. {how_often} it takes {format_seconds(stretched)}{dollars}, with --checkpointing_minutes {minutes:.3g}, which "
        "loses the least."
    )


def _dollars(value: float) -> str:
    """Write dollars: in cents, and less than one in hundredths of it.

    >>> _dollars(0.0032), _dollars(0.25), _dollars(0.0)
    ('0.0032', '0.25', '0.00')
    """
    if 0 < value < 0.01:
        return f"{value:.4f}"
    return f"{value:,.2f}" if value < 10 else round_number(value)


def format_range(seconds: float, low: float, high: float) -> str:
    """Write a duration and its range in one unit.

    >>> format_range(294624, 203290, 385957), format_range(4000, 2760, 5240), format_range(0.14, 0.1, 0.18)
    ('82 hours (56 to 107)', '67 minutes (46 to 87)', '0.14 seconds (0.1 to 0.18)')
    >>> format_range(2e6, 1.4e6, 2.6e6)
    '23 days (16 to 30)'
    """
    size, unit = _choose_unit(seconds)
    value, *ends = (round_number(number / size) for number in (seconds, low, high))
    return f"{value} {unit} ({' to '.join(ends)})"


def _choose_unit(seconds: float) -> tuple[int, str]:
    units = ((7 * 86400, 86400, "days"), (2 * 3600, 3600, "hours"), (120, 60, "minutes"), (0, 1, "seconds"))
    return next((size, unit) for least, size, unit in units if seconds >= least)


def format_seconds(seconds: float) -> str:
    """Write a duration in one unit.

    >>> [format_seconds(value) for value in (0.5, 96, 630, 40000, 2e6)]
    ['0.5 seconds', '96 seconds', '10 minutes', '11 hours', '23 days']
    """
    size, unit = _choose_unit(seconds)
    return f"{round_number(seconds / size)} {unit}"


def _wrap_command(command: str) -> list[str]:
    """Break a command for the shell between flags, with a backslash at the end of each line but the last."""
    parts: list[str] = []
    for word in map(shlex.quote, shlex.split(command)):
        if parts and re.fullmatch(r"--\w+", parts[-1]) and not word.startswith("-"):
            parts[-1] += f" {word}"  # the value of a flag
        else:
            parts.append(word)
    lines = [" "]
    for part in parts:
        if len(lines[-1]) + len(part) > line_width(WIDTH) - 3 and lines[-1].strip():
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {part}"
    return lines


def _list_details(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """List the details: a name of at most 10 characters, and what is said of it."""
    yield from ((name, answer[name]) for name in ("source", "expect") if name in answer)
    names = ("global_batch_size", "num_processes", "per_device_train_batch_size", "gradient_accumulation_steps")
    yield "layout", str(Layout(*(answer[name] for name in names)))
    if "hardware" in answer:
        yield "strategy", f"{answer['strategy']}: {answer['reason']}"
    numbers = [f"{name} {answer[name]:.6g}" for name in OPTIMIZER if answer.get(name) is not None]
    yield from [("optimizer", ", ".join(numbers))] * bool(numbers)
    yield from _list_schedule(answer)
    yield from _list_model(answer)
    yield "memory", _describe_memory(answer)
    if answer["accumulation"] == "optimizer":
        yield "note", explain_accumulation(answer["second_moment"])
    if answer["communication"] is not None and "hardware" not in answer:  # there it is said at the head
        yield "note", answer["communication"]
    if "trace" in answer:
        yield "trace", _describe_trace(answer["trace"])
    if "hardware" in answer:
        yield from _list_hardware(answer)


def _list_schedule(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if answer["num_steps"] is None:
        return
    per_epoch = answer["steps_per_epoch"]
    epochs = "" if per_epoch is None else f", {per_epoch:,.6g} per epoch"
    if answer["batch_sizes"] is not None:
        epochs = f", {describe_sizes(answer['batch_sizes'])}"
    text = f"{answer['num_steps']:,} steps{epochs}"
    if answer["learning_rates"] is not None:
        (_, first), (_, last) = answer["learning_rates"][0], answer["learning_rates"][-1]
        text += (
            f", {answer['num_warmup_steps']:,} of warm-up; learning rate {first:.4g} at step 0, {last:.4g} at the end"
        )
    yield "schedule", text


def _list_model(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    states, gradients = answer["states"], "gradients and " if answer["accumulation"] == "gradient" else ""
    yield (
        "model",
        f"{answer['num_parameters']:,} parameters; with {gradients}moments {states / 1e9:.3f} GB "
        f"({states / 2**30:.3f} GiB)",
    )
    if "traced_layers" in answer:
        yield (
            "traced",
            f"no formula knows this kind of model: a step of {answer['traced_layers']} layers was traced on fake tensors, "
            "and extended to all. Recurrences are computed as without packages of kernels",
        )
    if "images" in answer:
        images = answer["images"]
        yield (
            "images",
            f"{describe_images(images['sizes'])} pixels, {images['tokens']:,} of the tokens of a sample; --image_sizes "
            "plans others",
        )
    flops = f"{answer['flops_per_sample'] / 1e9:,.1f}"
    if "flops_per_token" in answer:
        length = round(answer["flops_per_sample"] / answer["flops_per_token"])
        yield (
            "compute",
            f"{answer['flops_per_token'] / 1e9:.4g} GFLOP per token, {flops} per sample of {length}, forward and "
            f"backward; at most {answer['tokens_per_step']:,} tokens per step",
        )
    else:
        yield "compute", f"{flops} GFLOP per image, forward and backward"
    whole, half = (num_bytes / 1e6 for num_bytes in answer["saved_bytes_per_sample"].values())
    yield (
        "keeps",
        f"{whole:,.1f} MB of activations per sample in float32, {half:,.1f} MB under autocast, from its forward "
        "to its backward; logits not counted",
    )
    disk = f"{_size(answer['checkpoint_bytes'])} for a checkpoint, {_size(answer['model_bytes'])} for the "
    disk += "adapter" if answer["is_adapter"] else "model"
    yield "disk", disk + (f"; {_describe_disk(answer)}" if "hardware" in answer else "")


def _describe_disk(answer: dict[str, Any]) -> str:
    """Say the room on the disk, with the data where somebody has counted them, and the download of weights."""
    data = answer["data_bytes"]
    text = f"{_size(answer['disk_bytes'])} in all with {KEPT_CHECKPOINTS} checkpoints and "
    text += (
        "without data, whose samples are not counted" if data is None else f"{_size(data)} of data and cache (assumed)"
    )
    return text + (f"; {_size(answer['download_bytes'])} of weights to download" if answer["download_bytes"] else "")


def _size(num_bytes: float) -> str:
    size, unit = (1e9, "GB") if num_bytes >= 1e9 else (1e6, "MB")
    return f"{num_bytes / size:,.3g} {unit}" if num_bytes < 1000 * size else f"{num_bytes / size:,.0f} {unit}"


def _describe_memory(answer: dict[str, Any]) -> str:
    items = dict(answer["memory"])
    total = items.pop("total")
    size, unit = (1e9, "GB (1e9 bytes)") if total >= 1e9 else (1e6, "MB (1e6 bytes)")
    parts = [f"{name.replace('_', ' ')} {num_bytes / size:.1f}" for name, num_bytes in items.items() if num_bytes]
    options = [f"mixed_precision {answer['mixed_precision']}"]
    options += [name for name in ("gradient_checkpointing", "sharded") if answer[name]]
    return f"{total / size:.1f} {unit} per process, planned: {', '.join(parts)} ({', '.join(options)})"


def _describe_trace(trace: dict[str, Any]) -> str:
    peaks = ", ".join(f"{name.replace('_', ' ')} {peak / 1e9:.3g}" for name, peak in trace["memory_peaks"].items())
    formula = ""
    if trace["error"] is not None:
        formula = f"; the formula has {trace['planned'] / 1e9:.4g} ({trace['error']:+.1%})"
    return (
        f"{trace['peak'] / 1e9:.4g} GB on fake tensors, with whole weights ({peaks}){formula}. "
        f"{trace['num_parameters']:,} parameters, {trace['flops'] / 1e9:,.0f} GFLOP in a forward and backward"
    )


def _list_hardware(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    peaks = ", ".join(f"{name.replace('_', ' ')} {peak / 1e9:.1f}" for name, peak in answer["memory_peaks"].items())
    yield "peaks", f"{peaks} GB"
    need, capacity = answer["memory_needed"] / 1e9, answer["memory_of_device"] / 1e9
    yield (
        "margins",
        f"{need:.1f} GB of {capacity:.1f}. That is the plan, with {BAND:.0%} by which it may miss (no GPU was measured), and "
        f"{RESERVED / 1e9:g} GB left alone. nvidia-smi shows what the allocator holds, up to a third more than is in use",
    )
    yield "host RAM", f"at least {_size(answer['host_memory'])} on a machine: {answer['host_memory_why']}"
    yield from _list_time(answer)
    if answer["unverified"]:
        yield "device", f"{', '.join(answer['unverified'])}: unverified, as nobody here could open the source"
    if answer["all_reduce_seconds"]:
        seconds = ", ".join(
            f"{name.replace('_', ' ')} {value:.2g}" for name, value in answer["all_reduce_seconds"].items()
        )
        size = _size(4 * answer["num_trained"])
        yield "all-reduce", f"{size} of gradients over links at their full rate, seconds: {seconds}"


def _list_time(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """List the predicted speed, and the parts of a step's time."""
    time, total = answer["time"], answer["time"]["total"]
    note = ", padding counted" if answer["tokens_per_second"] else ""
    parts = {name: part for name, part in time.items() if name not in NOT_IN_TOTAL and part > 0.005 * total}
    shares = ", ".join(f"{name.replace('_', ' ')} {part / total:.0%}" for name, part in parts.items())
    yield "time", f"{total:.3g} s per step, {answer['share_of_peak']:.0%} of the peak, predicted{note}: {shares}"


def write_comparison(answer: dict[str, Any]) -> Iterator[str]:
    """Write the table of `plan` on several hardware from its JSON object, in the order of its rows."""
    length = "" if answer["num_steps"] is None else f", {answer['num_steps']:,} steps"
    yield f"{answer['title']}, predicted: {answer['global_batch_size']:,} samples per step{length}"
    placed = [row for row in answer["rows"] if "problem" not in row]
    unit = "tokens" if any(row["tokens_per_second"] for row in placed) else "samples"
    names = (
        "hardware",
        "GB a device",
        "b",
        "k",
        "precision",
        f"{unit}/s",
        "to the end",
        "dollars",
        "$ a billion tokens",
    )
    table = [names, *(_list_cells(row, unit) for row in placed)]
    table = [column for column in zip(*table, strict=True) if any(column[1:])]  # empty columns are left out
    yield from write_table(list(zip(*table, strict=True)))
    for row in answer["rows"]:
        if "problem" in row:
            yield from _wrap(f"{row['hardware']}: {row['problem']}", indent="  ")
        elif _is_host_short(row):
            yield from _wrap(f"{row['hardware']} does NOT fit the hosts: {_describe_host(row)}", indent="  ")
    yield from _list_missing(placed)


def _list_cells(row: dict[str, Any], unit: str) -> tuple[str, ...]:
    seconds, cost, billion = row["seconds_to_end"], row["cost"], row["cost_per_billion_tokens"]
    sizes = (f"{row[name]:,}" for name in ("per_device_train_batch_size", "gradient_accumulation_steps"))
    return (
        row["hardware"],
        f"{row['memory_needed'] / 1e9:.1f} of {row['memory_of_device'] / 1e9:.1f}",
        *sizes,
        _describe_options(row),
        round_number(row[f"{unit}_per_second"]),
        "" if seconds is None else format_range(seconds, *row["seconds_to_end_range"]),
        "" if cost is None else f"{_dollars(cost)} ({' to '.join(map(_dollars, row['cost_range']))})",
        "" if billion is None else _dollars(billion),
    )


def _describe_options(row: dict[str, Any], usual_precision: str = "") -> str:
    """Name the precision, if it is not the usual one, and what was needed to fit."""
    names = [] if row["mixed_precision"] == usual_precision else [row["mixed_precision"].replace("no", "float32")]
    names += ["checkpointing"] * row["gradient_checkpointing"] + ["sharded"] * row["sharded"]
    return " ".join(names)


def write_table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Write rows of cells, of which the first has the names of the columns, as lines.

    On a terminal that is too narrow all rows go on, between the same columns, in further lines, which are indented.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        texts = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        for number, columns in enumerate(split_columns(widths, line_width(WIDEST))):
            line = "  ".join(texts[columns.start : columns.stop]).rstrip()
            if line:
                yield (GOES_ON if number else "") + line


def split_columns(widths: Sequence[int], room: int) -> list[range]:
    """Split the columns of a table into as few lines of at most `room` characters as there may be; one at least in each.

    >>> split_columns([10, 5, 5], 24), split_columns([10, 5, 5, 5], 17), split_columns([90], 80)
    ([range(0, 3)], [range(0, 2), range(2, 4)], [range(0, 1)])
    """
    lines, first, used = [], 0, -2  # no gap before the first
    for number, width in enumerate(widths):
        if number > first and used + 2 + width > room:
            lines.append(range(first, number))
            first, used = number, len(GOES_ON) - 2
        used += 2 + width
    return [*lines, range(first, len(widths))]


def write_fits(answer: dict[str, Any], command: str) -> Iterator[str]:
    """Write what fits on some hardware from its JSON object.

    Args:
        answer: of `answer.describe_fits`.
        command: plans the largest model that fits; empty: there is none.
    """
    precisions = {row["typical"]["mixed_precision"].replace("no", "float32") for row in answer["rows"]}
    options = f", in {' and '.join(sorted(precisions))}" if precisions else ""
    yield from _wrap(f"What fits on {answer['hardware']}{options}: {answer['device']}")
    if not answer["rows"]:
        yield "None of the models that the planner knows: take more or larger devices, or shorter samples"
    else:
        yield from write_table(make_fits_table(answer))
        yield from _wrap(f"Speeds: {explain_band([answer])}.")
    if answer["too_large"]:
        yield from _wrap(f"Too large: {', '.join(answer['too_large'])}", indent="  ")
    if command:
        planned = max(answer["rows"], key=lambda row: row["num_parameters"])
        yield ""
        yield from _wrap(f"To plan {planned['model']} by {planned['method']}, with its launch file and its recipe")
        yield from _wrap_command(command)
        yield from _wrap(
            "For another model change --model_name_or_path. QLoRA is LoRA with --base_quantization nf4. Training of all "
            "weights has neither this nor the --lora_ flags, and a lower --learning_rate."
        )


def make_fits_table(answer: dict[str, Any]) -> list[tuple[str, ...]]:
    """Make the table of what fits: names of columns, and a row for each of the answer's, without columns that are empty."""
    if not answer["rows"]:
        return [("model",)]
    room = f"GB of {answer['rows'][0]['typical']['memory_of_device'] / 1e9:.1f}"
    names = ("model", "method", "tokens", room, "b", "with", "tokens/s", "$ a billion", "longest", "tokens/s")
    table = [names, *(_list_fit_cells(row) for row in answer["rows"])]
    return list(zip(*(column for column in zip(*table, strict=True) if any(column[1:])), strict=True))


def _list_fit_cells(row: dict[str, Any]) -> tuple[str, ...]:
    typical, longest = row["typical"], row["longest"]
    cost = typical["cost_per_billion_tokens"]
    return (
        row["model"],
        row["method"],
        f"{typical['length']:,}",
        f"{typical['memory_needed'] / 1e9:.1f}",
        f"{typical['per_device_train_batch_size']:,}",
        _describe_options(typical, typical["mixed_precision"]),
        round_number(typical["tokens_per_second"]),
        "" if cost is None else _dollars(cost),
        f"{longest['length']:,}",
        round_number(longest["tokens_per_second"]),
    )


def _list_missing(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Say what hours or dollars need, and how far they may be off."""
    if not rows:
        return
    first = rows[0]
    if first["seconds_to_end"] is None:
        yield from _wrap(f"How long: {_explain_missing(first)}.")
    else:
        yield from _wrap(f"Ranges: {explain_band(rows)}.")
    for line in list_networks(rows):
        yield from _wrap(f"{line}.")


def list_networks(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Say of each hardware of several nodes what connects them, and how long a step waits for it."""
    for row in rows:
        if row["network"]:
            share = row["time"]["exposed_communication"] / row["time"]["total"]
            waits = f"for which {share:.0%} of a step waits; --network says another"
            yield f"{row['hardware']}: {row['network']} between nodes, {waits}"


def explain_band(answers: list[dict[str, Any]]) -> str:
    """Say how sure speeds are, and what widens their ranges."""
    widths = sorted({answer["speed_band"] for answer in answers})
    width = " to ".join(f"{width:.0%}" for width in dict.fromkeys((widths[0], widths[-1])))
    reasons = " or ".join(dict.fromkeys(reason for answer in answers for reason in answer["never_compared"]))
    if reasons and len(answers) == 1:
        return f"the range is {width}, wider than held 9 of 10 published speeds, as none of them is {reasons}"
    text = f"9 of 10 held-out published speeds lay within {width}"
    return f"{text}; none of them is {reasons}" if reasons else text


def _explain_missing(answer: dict[str, Any]) -> str:
    rows = answer.get("train_rows")
    why = f"that are not counted: {rows['why']}" if rows and rows["why"] else "that are not counted yet"
    needs = {
        "num_train_samples": f"the length is in epochs, of samples {why}. Add --num_train_samples N, "
        "which a run prints before its first step, also with --rehearse",
        "max_train_steps": "no length is given: add --max_train_steps N"
        + " or --num_train_tokens N" * bool(answer["tokens_per_second"]),
    }
    return f"not known, because {needs[answer['missing']]}"


def write_scale(answer: dict[str, Any]) -> Iterator[str]:
    """Write the lines of `scale` from its JSON object."""
    batch, columns = answer["global_batch_size"], "   s/step   samples/s  efficiency  waiting"
    title = f"{answer['recipe']} on {answer['device']}, predicted"
    yield from wrap(f"{title}: the global batch of {batch} (strong), and one that grows (weak)", line_width(WIDEST))
    is_narrow = line_width(WIDEST) < NARROW
    if is_narrow:  # one table below the other
        yield f"devices       b    k {columns}"
    else:
        yield f"devices       b    k {columns} |    batch {columns}"
    second = [f"devices    batch {columns}"]
    for row in answer["rows"]:
        strong, weak = f"{'does not fit, or leaves devices idle':>55}", ""
        if row["strong"]:
            b, k = row["strong"]["per_device_train_batch_size"], row["strong"]["gradient_accumulation_steps"]
            strong = f"{b:7} {k:4} {_write_speed(row['strong'])}"
        if row["weak"]:
            weak = f"{row['weak']['global_batch_size']:9} {_write_speed(row['weak'])}"
        second += [f"{row['num_devices']:7}{weak}"] * bool(weak)
        yield f"{row['num_devices']:7} {strong}{'' if is_narrow else f' |{weak}'}".rstrip()
    yield from second if is_narrow else []
    for remark in answer["remarks"]:
        yield from wrap(f"- {remark}", line_width(WIDEST), "  ")


def _write_speed(numbers: dict[str, Any]) -> str:
    waiting = numbers["exposed_communication"] / numbers["seconds"]
    speed, efficiency = numbers["samples_per_second"], numbers["efficiency"]
    return f"{numbers['seconds']:9.3g} {speed:11,.0f} {efficiency:11.0%} {waiting:8.0%}"
