"""The answers of `plan` and `scale` as lines of text."""

from collections.abc import Iterator
from typing import Any

from samestep.cut.layout import Layout
from samestep.planner.placement import BAND, RESERVED
from samestep.recipe.reading import is_installed

OPTIMIZER = ("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "warmup_epochs")
NOT_IN_TOTAL = ("total", "communication", "at_peak")  # of a step's time


def write_plan(answer: dict[str, Any]) -> Iterator[str]:
    """Write the lines of `plan` from its JSON object."""
    yield f"{answer['recipe']}: {answer['description']}"
    for name in ("source", "expect"):
        if name in answer:
            yield f"  {name:10} {answer[name]}"
    names = ("global_batch_size", "num_processes", "per_device_train_batch_size", "gradient_accumulation_steps")
    yield f"  layout     {Layout(*(answer[name] for name in names))}"
    numbers = [f"{name} {answer[name]:.6g}" for name in OPTIMIZER if answer.get(name) is not None]
    yield from [f"  optimizer  {', '.join(numbers)}"] * bool(numbers)
    yield from _write_schedule(answer)
    yield from _write_model(answer)
    yield f"  memory     {_write_memory(answer)}"
    if answer["accumulation"] == "optimizer":
        yield f"  note       {explain_accumulation(answer['second_moment'])}"
    if "trace" in answer:
        yield _write_trace(answer["trace"])
    if "hardware" in answer:
        yield from _write_hardware(answer)


def explain_accumulation(second_moment: str | None) -> str:
    """Say what accumulation in the optimizer means for a step; `second_moment` as in a recipe."""
    exact = "the cut is exact"
    if second_moment is not None:
        exact = f"the cut is not exact, because AdamW's second moment is estimated ({second_moment})"
    return (
        f"gradients are folded into the optimizer's moments, which saves 4 bytes per parameter: {exact}; the gradient's norm "
        "is an estimate, and clipping keeps the direction of the unclipped step"
    )


def _write_schedule(answer: dict[str, Any]) -> Iterator[str]:
    if answer["num_steps"] is None:
        return
    per_epoch = answer["steps_per_epoch"]
    epochs = "" if per_epoch is None else f", {per_epoch:,.6g} per epoch"
    line = f"  schedule   {answer['num_steps']:,} steps{epochs}"
    if answer["learning_rates"] is not None:
        (_, first), (_, last) = answer["learning_rates"][0], answer["learning_rates"][-1]
        line += (
            f", {answer['num_warmup_steps']:,} of warm-up; learning rate {first:.4g} at step 0, {last:.4g} at the end"
        )
    yield line


def _write_model(answer: dict[str, Any]) -> Iterator[str]:
    states, gradients = answer["states"], "gradients and " if answer["accumulation"] == "gradient" else ""
    yield (
        f"  model      {answer['num_parameters']:,} parameters; with {gradients}moments {states / 1e9:.3f} GB "
        f"({states / 2**30:.3f} GiB) in float32"
    )
    flops = f"{answer['flops_per_sample'] / 1e9:,.1f}"
    if "flops_per_token" in answer:
        length = round(answer["flops_per_sample"] / answer["flops_per_token"])
        yield (
            f"  compute    {answer['flops_per_token'] / 1e9:.4g} GFLOP per token, {flops} per sample of {length}, forward and "
            f"backward; at most {answer['tokens_per_step']:,} tokens per step"
        )
    else:
        yield f"  compute    {flops} GFLOP per image, forward and backward"
    whole, half = (num_bytes / 1e6 for num_bytes in answer["saved_bytes_per_sample"].values())
    yield (
        f"  keeps      {whole:,.1f} MB of activations per sample in float32, {half:,.1f} MB under autocast, from its forward "
        "to its backward; logits not counted"
    )


def _write_memory(answer: dict[str, Any]) -> str:
    items = dict(answer["memory"])
    total = items.pop("total")
    size, unit = (1e9, "GB (1e9 bytes)") if total >= 1e9 else (1e6, "MB (1e6 bytes)")
    parts = [f"{name.replace('_', ' ')} {num_bytes / size:.1f}" for name, num_bytes in items.items() if num_bytes]
    options = [f"mixed_precision {answer['mixed_precision']}"]
    options += [name for name in ("gradient_checkpointing", "sharded") if answer[name]]
    return f"{total / size:.1f} {unit} per process, planned: {', '.join(parts)} ({', '.join(options)})"


def _write_trace(trace: dict[str, Any]) -> str:
    peaks = ", ".join(f"{name.replace('_', ' ')} {peak / 1e9:.3g}" for name, peak in trace["memory_peaks"].items())
    return (
        f"  trace      {trace['peak'] / 1e9:.4g} GB on fake tensors, with whole weights ({peaks}); the plan has "
        f"{trace['planned'] / 1e9:.4g} ({trace['error']:+.1%}). {trace['num_parameters']:,} parameters, "
        f"{trace['flops'] / 1e9:,.0f} GFLOP in a forward and backward"
    )


def _write_hardware(answer: dict[str, Any]) -> Iterator[str]:
    peaks = ", ".join(f"{name.replace('_', ' ')} {peak / 1e9:.1f}" for name, peak in answer["memory_peaks"].items())
    yield f"  peaks      {peaks} GB"
    need, capacity = answer["memory_needed"] / 1e9, answer["memory_of_device"] / 1e9
    yield f"  fits       {need:.1f} GB of {capacity:.1f}: the plan, {BAND:.0%} that it may miss (no GPU was measured), and"
    yield f"             {RESERVED / 1e9:g} GB left alone"
    yield f"  strategy   {answer['strategy']}: {answer['reason']}"
    yield from _write_time(answer)
    if answer["all_reduce_seconds"]:
        seconds = ", ".join(
            f"{name.replace('_', ' ')} {value:.3g}" for name, value in answer["all_reduce_seconds"].items()
        )
        size = 4 * answer["num_parameters"] / 1e6
        yield f"  all-reduce {size:,.4g} MB of gradients over links at their full rate, seconds: {seconds}"
    for warning in answer["warnings"]:
        yield f"  note       {warning}"
    command = answer["command"]
    yield f"  launch     {command or 'no script of this repository trains it yet'}"
    if command and "FILE.yaml" in command:
        yield "             FILE.yaml: add --write_config FILE.yaml to this command"
    if command and is_installed():
        yield "             scripts/ is in the repository, not in the installed package: run it from a checkout"


def _write_time(answer: dict[str, Any]) -> Iterator[str]:
    """Write the predicted speed, the parts of a step's time, and the time of the whole recipe."""
    time, total, tokens = answer["time"], answer["time"]["total"], answer["tokens_per_second"]
    speed = f"{answer['samples_per_second']:,.4g} samples/s" + (f", {tokens:,.0f} tokens/s" if tokens else "")
    note = ", padding counted" if tokens else ""
    yield f"  time       {total:.3g} s per step: {speed}, {answer['share_of_peak']:.0%} of the peak; predicted{note}"
    parts = {name: part for name, part in time.items() if name not in NOT_IN_TOTAL and part > 0.005 * total}
    yield "             " + ", ".join(f"{name.replace('_', ' ')} {part / total:.0%}" for name, part in parts.items())
    if answer["seconds_to_end"] is not None:
        hours, energy = answer["seconds_to_end"] / 3600, answer["energy_kwh"]
        yield f"             {answer['num_steps']:,} steps take {_round(hours)} hours, {_round(energy)} kWh at the power limit"


def _round(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def write_scale(answer: dict[str, Any]) -> Iterator[str]:
    """Write the lines of `scale` from its JSON object."""
    batch, columns = answer["global_batch_size"], "   s/step   samples/s  efficiency  waiting"
    yield (
        f"{answer['recipe']} on {answer['device']}, predicted: the global batch of {batch} (strong), and one that grows (weak)"
    )
    yield f"devices       b    k {columns} |    batch {columns}"
    for row in answer["rows"]:
        strong, weak = f"{'does not fit, or leaves devices idle':>55}", ""
        if row["strong"]:
            b, k = row["strong"]["per_device_train_batch_size"], row["strong"]["gradient_accumulation_steps"]
            strong = f"{b:7} {k:4} {_write_speed(row['strong'])}"
        if row["weak"]:
            weak = f"{row['weak']['global_batch_size']:9} {_write_speed(row['weak'])}"
        yield f"{row['num_devices']:7} {strong} |{weak}".rstrip()
    for remark in answer["remarks"]:
        yield f"- {remark}"


def _write_speed(numbers: dict[str, Any]) -> str:
    waiting = numbers["exposed_communication"] / numbers["seconds"]
    speed, efficiency = numbers["samples_per_second"], numbers["efficiency"]
    return f"{numbers['seconds']:9.3g} {speed:11,.0f} {efficiency:11.0%} {waiting:8.0%}"
