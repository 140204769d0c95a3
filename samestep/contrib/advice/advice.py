"""Advises on the global batch of a run from its measured gradient noise, and changes the recipe for it.

Reads what a run left in its output folder: metrics.jsonl, noise.jsonl, recipe.yaml, settings.json. Needs no torch.
"""

import dataclasses
import functools
import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

from samestep.contrib.advice import ramp
from samestep.contrib.noise import signal_share
from samestep.errors import UsageError
from samestep.printing import format_count, round_number
from samestep.recipe import batch_size, scaling
from samestep.recipe import catalog as recipes
from samestep.recipe.reading import format_name
from samestep.recipe.recipe import Recipe
from samestep.recipe.run_files import read_lines, read_settings
from samestep.recipe.tasks.text_pretraining import TextPretraining

MAX_HALF_WIDTH = 0.5
"""Half of the interval of the signal's share over the share, above which a batch is not advised."""
MIN_CHANGE = 0.1
"""Changes of the batch below this share of it are not worth a recipe."""
UNKNOWN_PARTS = (
    "the noise scale of a part of the training is not known well enough; measure more often (--noise_scale_steps)"
)
TIMES = (("hours", 1), ("minutes", 60), ("seconds", 3600))
"""Units of a training, the first that is two or more."""
WIDTHS = 9, 22, 7, 4, 8, 16
"""Widths of the columns of the table of batches."""
FACTORS = (0.25, 0.5, 1, 2, 4, 8)
"""Batches that the table shows, over the one in use, beside the advised one."""
LIMITS = (
    "Limits: the noise scale stands in for the critical batch size, which training branches of a run measures. Merrill et al. "
    "2505.23971 find it no reliable stand-in, and the critical batch near 0 at first, rising fast, then level; Zhang et al. "
    "2410.21676, that it grows with the data, not with the model. So compare both recipes on a part of the training first."
)


def advise(folder: str, more_tokens: float, *, grows: bool = False) -> tuple[dict[str, Any], Recipe | None]:
    """Find the batch that a run's noise allows, and the recipe for it.

    Args:
        folder: output folder of the run.
        more_tokens: share of its tokens that a larger batch may take more, to the same loss.
        grows: whether the changed recipe is that of the batch that grows.

    Returns:
        The answer, for `write` or as JSON; the changed recipe, None where no other batch is advised.

    Raises:
        UsageError: no folder of a run.
    """
    path = Path(folder)
    if not (path / "metrics.jsonl").is_file() or not (path / "recipe.yaml").is_file():
        raise UsageError(
            f"{format_name(folder)} holds no metrics.jsonl and recipe.yaml: give the output folder of a run"
        )
    recipe = recipes.load(str(path / "recipe.yaml"))
    settings = read_settings(path / "settings.json")
    steps = [line for line in read_lines(path / "metrics.jsonl") if "loss" in line]
    noises = list(read_lines(path / "noise.jsonl"))
    measurements = batch_size.read_measurements(steps)
    answer: dict[str, Any] = {
        "run": folder,
        "recipe": recipe.name,
        "unit": recipe.unit,
        "global_batch_size": recipe.global_batch_size,
        "num_steps": len(steps),
        "num_measurements": len(measurements),
        "more_tokens": more_tokens,
    }
    if len(measurements) < batch_size.MIN_MEASUREMENTS:
        return answer | {"unknown": _explain_few(answer)}, None
    if recipe.batch_schedule is not None:
        return answer | {"unknown": "its batch grows: measure a run with one batch"}, None
    windows = batch_size.split(measurements)
    share = signal_share.find_signal_share(windows, recipe.global_batch_size)
    answer["windows"] = [
        {"steps": [window[0].step, window[-1].step]} | _describe(batch_size.estimate(window)) for window in windows
    ]
    answer["noise_scale"] = _describe(_find_noise_scale(share, recipe.global_batch_size, len(measurements)))
    answer["targets_per_sample"] = _count_targets(noises)
    answer["layers"] = {name: _describe(found) for name, found in batch_size.estimate_layers(noises).items()}
    answer["terms"] = {
        term: _describe(batch_size.estimate(own))
        for term in recipe.loss_weights
        if len(own := batch_size.read_measurements(steps, term)) >= batch_size.MIN_MEASUREMENTS
    }
    answer["signal_share"] = {name: part if math.isfinite(part) else None for name, part in share._asdict().items()}
    if not (share.is_known and share.high - share.value <= MAX_HALF_WIDTH * share.value):
        return answer | {"unknown": _explain_wide(answer, share)}, None
    batch, answer["is_larger"] = _choose(recipe.global_batch_size, share.value, more_tokens)
    hardware = answer["hardware"] = _describe_hardware(settings, noises, steps)
    batch = _round_to_micro_batches(batch, recipe.global_batch_size, hardware)
    answer["advised_batch_size"] = batch
    batches = {round(factor * recipe.global_batch_size) for factor in FACTORS} | {batch}
    answer["batches"] = [
        _describe_batch(size, recipe.global_batch_size, share, hardware, steps) for size in sorted(batches) if size > 0
    ]
    round_size = functools.partial(_round_to_micro_batches, old_batch=recipe.global_batch_size, hardware=hardware)
    growth = ramp.find_ramp(windows, len(steps), recipe.global_batch_size, more_tokens, round_size)
    growing = growth and ramp.make_recipe(recipe, growth, path.name)
    if growing:
        answer["ramp"] = dataclasses.asdict(growth) | {"changes": growing[1]}
        answer["ramp"]["command"] = _write_command(growing[0], hardware)
    if grows and not growing:
        is_known = len(windows) > 1 and all(
            signal_share.find_signal_share([each], recipe.global_batch_size).is_known for each in windows
        )
        answer["why_no_ramp"] = "the noise scale does not grow by enough" if is_known else UNKNOWN_PARTS
    if grows:
        return answer | {"is_ramp": True}, growing[0] if growing else None
    if abs(batch / recipe.global_batch_size - 1) < MIN_CHANGE:
        return answer | {"advised_batch_size": recipe.global_batch_size}, None
    ratio = signal_share.tokens_ratio(share.value, batch / recipe.global_batch_size)
    changed, answer["changes"] = change(recipe, batch, ratio, folder)
    answer["command"] = _write_command(changed, hardware)
    return answer, changed


def _explain_few(answer: dict[str, Any]) -> str:
    """Say that too few steps were measured, and what helps."""
    number, least = answer["num_measurements"], batch_size.MIN_MEASUREMENTS
    every = max(1, answer["num_steps"] // (4 * least))
    if number == 0:
        return f"no step's noise was measured: train it with --noise_scale_steps {every}"
    return f"the noise of {number} steps was measured, fewer than {least}: train it with --noise_scale_steps {every}, or longer"


def _explain_wide(answer: dict[str, Any], share: signal_share.SignalShare) -> str:
    """Say that the interval is too wide, what is known none the less, and what helps."""
    number = answer["num_measurements"]
    relative = (share.high - share.value) / share.value if share.is_known else math.inf
    wanted = math.ceil(number * (relative / MAX_HALF_WIDTH) ** 2) if relative < 10 else 10 * number
    text = f"the interval of {number} measured steps is too wide: measure about {wanted:,} (--noise_scale_steps"
    text += f" {max(1, answer['num_steps'] // wanted)}, or a longer run)"
    batch = answer["global_batch_size"]
    if signal_share.MIN_SHARE < share.high < 1:
        least = batch / share.high - batch
        safe = batch * signal_share.find_largest(share.high, answer["more_tokens"])
        text += (
            f". What is known: the noise scale is at least {batch_size.format_size(least)} samples, so a batch of up to "
            f"{math.floor(safe):,} takes at most {100 * answer['more_tokens']:.3g} % more tokens"
        )
    return text


def _describe(estimate: batch_size.Estimate) -> dict[str, Any]:
    """Describe an estimate for JSON, which has no infinity."""
    values = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _find_noise_scale(share: signal_share.SignalShare, batch: int, number: int) -> batch_size.Estimate:
    """Find the noise scale that would give the mean share of the signal, and its interval."""
    value, low, high = (batch / part - batch if part > 0 else math.inf for part in (share.value, share.high, share.low))
    return batch_size.Estimate(value, low, high, number)


def _count_targets(noises: list[dict[str, Any]]) -> dict[str, float]:
    """Count the targets of each loss term in a sample, from the lines of noise.jsonl."""
    samples = sum(line["samples"] for line in noises)
    return {
        name: sum(line["targets"].get(name, 0) for line in noises) / samples
        for name in (noises[0]["targets"] if noises else ())
    }


def _choose(batch: int, share: float, more_tokens: float) -> tuple[float, bool]:
    """Choose a batch: the largest that `more_tokens` allows or, where most of the gradient is signal, the noise scale.

    Returns:
        the batch, and whether it is chosen because a larger one takes few more tokens.
    """
    if share > 0.5:
        return batch / share - batch, False
    return batch * signal_share.find_largest(share, more_tokens), True


def _describe_hardware(
    settings: dict[str, Any], noises: list[dict[str, Any]], steps: list[dict[str, Any]]
) -> dict[str, Any]:
    """Describe the processes of the run, and the samples that one of them computes at once."""
    line = noises[-1] if noises else {}
    size, max_tokens = (line.get(f"per_device_train_{name}") for name in ("batch_size", "tokens"))
    lengths = [line["tokens"] / line["samples"] for line in steps if line.get("tokens") and line.get("samples")]
    if max_tokens is not None and lengths:
        size = min(size or math.inf, max(1, math.floor(max_tokens / fmean(lengths))))
    names = "num_processes", "mixed_precision", "device"
    return {name: settings.get(name) for name in names} | {"samples_at_once": size}


def _count_micro_batches(batch: int, hardware: dict[str, Any]) -> int | None:
    """Count the micro-batches of a process, k; None: the run does not say what fits."""
    if not hardware["samples_at_once"]:
        return None
    at_once: int = (hardware["num_processes"] or 1) * hardware["samples_at_once"]
    return math.ceil(batch / at_once)


def _round_to_micro_batches(batch: float, old_batch: int, hardware: dict[str, Any]) -> int:
    """Round a batch down to full micro-batches of all processes, if that changes it by less than a tenth."""
    whole = max(1, math.floor(batch))
    if hardware["samples_at_once"]:
        unit: int = (hardware["num_processes"] or 1) * hardware["samples_at_once"]
        rounded = whole // unit * unit
        if rounded > 0.9 * whole and (rounded - old_batch) * (whole - old_batch) > 0:
            return rounded
    return whole


def _describe_batch(
    batch: int,
    old_batch: int,
    share: signal_share.SignalShare,
    hardware: dict[str, Any],
    steps: list[dict[str, Any]],
) -> dict[str, Any]:
    """Describe what another batch takes to the same loss: tokens, steps, k, and seconds of this run's steps."""
    kappa = batch / old_batch
    value, *ends = (signal_share.tokens_ratio(part, kappa) for part in share)
    seconds = [line["seconds"] for line in steps if "grad_signal" not in line and "seconds" in line]
    old_k, k = (_count_micro_batches(size, hardware) for size in (old_batch, batch))
    result = {"batch_size": batch, "tokens": value, "tokens_range": sorted(ends), "steps": value / kappa}
    result |= {"gradient_accumulation_steps": k, "hours": None, "hours_without_accumulation": None}
    if seconds:
        hours = median(seconds) * len(steps) / 3600
        # As many tokens per second as the run had; with k times as many devices, k micro-batches take the time of one
        result["hours"] = hours * value
        if k is not None:
            result["hours_without_accumulation"] = hours * value / kappa / old_k
    return result


def change(recipe: Recipe, batch: int, tokens: float, folder: str) -> tuple[Recipe, dict[str, Any]]:
    """Change a recipe for another batch, which takes `tokens` times as many tokens to the same loss.

    Returns:
        The recipe, and the fields that changed: [old, new].
    """
    old_batch, numbers = recipe.global_batch_size, recipe.scaled_hyperparameters()
    kappa = batch / old_batch
    is_adam = recipe.optimizer_name in ("adamw", "muon")
    rate_factor = math.sqrt(kappa) if is_adam else kappa
    changes: dict[str, Any] = {
        "global_batch_size": batch,
        "learning_rate": _shorten(numbers.learning_rate * rate_factor),
        "learning_rate_batch_size": batch,
        "lr_scaling_rule": "none",
        # lr * weight_decay = batch / (timescale * tokens): the timescale, as a share of the training, stays
        "weight_decay": _shorten(recipe.weight_decay * kappa / rate_factor / tokens),
    }
    if is_adam:
        changes |= {
            "adam_beta1": numbers.adam_beta1,
            "adam_beta2": _shorten(scaling.beta2_half_life(numbers, old_batch, batch).adam_beta2),
            "adam_epsilon": numbers.adam_epsilon,
        }
    if isinstance(recipe, TextPretraining) and recipe.optimizer_name == "muon":
        rate = recipe.muon_learning_rate * numbers.learning_rate / recipe.learning_rate
        changes |= {
            "muon_learning_rate": _shorten(rate * rate_factor),
            "muon_weight_decay": _shorten(recipe.muon_weight_decay * kappa / rate_factor / tokens),
        }
    if numbers.warmup_epochs is not None:
        changes["warmup_epochs"] = numbers.warmup_epochs
    for name in ("max_train_steps", "lr_num_steps"):
        if getattr(recipe, name) is not None:
            changes[name] = math.ceil(getattr(recipe, name) * tokens / kappa)
    if recipe.num_train_epochs is not None:
        changes["num_train_epochs"] = float(f"{recipe.num_train_epochs * tokens:.4g}")
    if recipe.num_warmup_steps is not None and numbers.warmup_epochs is None:
        changes["num_warmup_steps"] = round(recipe.num_warmup_steps / kappa)
    changes["lr_first_step"] = round(recipe.lr_first_step / kappa)
    values = recipes.overlay(vars(recipe), changes)
    values |= {
        "name": f"{recipe.name}_batch_{batch}",
        "source": f"{recipe.name}, its batch changed from {old_batch} by the gradient noise of {Path(folder).name}",
        "expect": "not measured with these values",
    }
    changed = type(recipe)(**values)
    if problems := changed.problems():
        raise UsageError(f"a batch of {batch} is advised, but {'; '.join(problems)}")
    pairs = {name: [getattr(recipe, name), getattr(changed, name)] for name in changes}
    return changed, {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _shorten(value: float) -> float:
    """Round to four digits, those of 1 - value if that is small: 0.98051 stays 0.98051."""
    digits = 4 if value < 0.9 or value >= 1 else 4 + math.floor(-math.log10(1 - value))
    return float(f"{value:.{digits}g}")


def _write_command(recipe: Recipe, hardware: dict[str, Any]) -> str | None:
    """Write the command that trains a recipe, without its file, on the hardware of the run; None: it has no script."""
    if recipe.parts.script is None:
        return None
    n, precision = hardware["num_processes"] or 1, hardware["mixed_precision"] or "no"
    words = ["accelerate", "launch"]
    if hardware["device"] == "cpu":
        words += ["--config_file", f"accelerate_configs/{'cpu' if n == 1 else '2xcpu'}.yaml"]
        words += ["--num_processes", str(n)] if n > 2 else []
    else:
        words += ["--multi_gpu", "--num_processes", str(n)] if n > 1 else ["--num_processes", "1"]
    return shlex.join([*words, "--mixed_precision", precision, f"scripts/{recipe.parts.script}", "--recipe"])


def write(answer: dict[str, Any], file: str | None) -> Iterator[str]:
    """Write an answer of `advise` as lines of text; `file` is where the changed recipe was written, None: nowhere."""
    batch, unit = answer["global_batch_size"], answer["unit"]
    yield (
        f"{answer['run']}: {answer['recipe']}, {batch:,} samples per step, {answer['num_measurements']:,} of "
        f"{answer['num_steps']:,} steps measured"
    )
    if "windows" in answer:
        yield from _write_noise(answer)
    if "unknown" in answer:
        yield f"Not known: {answer['unknown']}"
        return
    yield from _write_batches(answer, unit)
    if "ramp" in answer:
        yield from _write_ramp(answer, unit, file)
    if "is_ramp" in answer:
        if "ramp" not in answer:
            yield f"Advice: no batch that grows: {answer['why_no_ramp']}."
        yield LIMITS
        return
    advised = answer["advised_batch_size"]
    if advised == batch:
        yield f"Advice: keep the batch of {batch:,}; another would gain little."
        yield LIMITS
        return
    row = next(row for row in answer["batches"] if row["batch_size"] == advised)
    why = f"at most {100 * answer['more_tokens']:.3g} % more tokens" if answer["is_larger"] else "the noise scale"
    yield f"Advice: {advised:,} samples per step, {why}: {row['tokens']:.3f} of the tokens, {row['steps']:.2f} of the steps."
    yield "  field: of the run -> for this batch"
    for name, (old, new) in answer["changes"].items():
        yield f"  {name}: {old} -> {new}"
    yield (
        "  (Learning rate by the square root of the batch for Adam, in proportion for SGD. beta2 by its half-life in tokens, "
        "2507.07101. Weight decay by its timescale, 2505.13738.)"
    )
    if file is None:
        yield "To write the recipe: the same command with --write_recipe FILE"
    elif answer["command"] is None:
        yield f"Wrote {file}"
    else:
        yield f"Wrote {file}. To train it:\n  {answer['command']} {shlex.quote(file)}"
    yield LIMITS


def _write_noise(answer: dict[str, Any]) -> Iterator[str]:
    yield "Noise scale in samples (90 % interval):"
    for window in answer["windows"]:
        first, last = window["steps"]
        yield f"  steps {first:,} to {last:,}: {_write_estimate(window)}"
    text = f"  whole training: {_write_estimate(answer['noise_scale'])}"
    value = answer["noise_scale"]["value"]
    if value is not None and answer["targets_per_sample"]:
        parts = [
            f"{round_number(value * number)} {name} targets" for name, number in answer["targets_per_sample"].items()
        ]
        text += f"; that is {', '.join(parts)}"
    yield text
    for name, term in answer["terms"].items():
        yield f"  {name} alone: {_write_estimate(term)}"
    known = [(layer["value"], name) for name, layer in answer["layers"].items() if layer["value"] is not None]
    if len(known) > 1:
        (low, first), (high, last) = min(known), max(known)
        sizes = batch_size.format_size(low), batch_size.format_size(high)
        yield f"  by layer, second half: from {sizes[0]} ({first}) to {sizes[1]} ({last})"


def _write_ramp(answer: dict[str, Any], unit: str, file: str | None) -> Iterator[str]:
    """Write the batch that grows; `file`: where the changed recipe was written, which is its own with --ramp."""
    found = answer["ramp"]
    yield (
        f"The noise scale grows, and so may the batch: {found['tokens']:.3f} of the {unit}s, {found['steps']:.2f} of the "
        "steps, by the upper end of its intervals:"
    )
    for name, (old, new) in found["changes"].items():
        yield f"  {name}: {old} -> {new}"
    if "is_ramp" not in answer:
        yield "  To write that recipe: --ramp --write_recipe FILE"
    elif file is not None:
        yield f"Wrote {file}." + (
            f" To train it:\n  {found['command']} {shlex.quote(file)}" if found["command"] else ""
        )


def _write_estimate(values: dict[str, Any]) -> str:
    value, low, high = (math.inf if values[name] is None else values[name] for name in ("value", "low", "high"))
    return str(batch_size.Estimate(value, low, high, 2))


def _write_batches(answer: dict[str, Any], unit: str) -> Iterator[str]:
    hardware = answer["hardware"]
    n, size = hardware["num_processes"] or 1, hardware["samples_at_once"]
    place = f"{format_count(n, 'process')}"
    at_once = f", {size:,} samples at once" if size else ""
    yield f"To the same loss, on the hardware of the run ({place}{at_once}), over this run's:"
    times = [row[name] for row in answer["batches"] for name in ("hours", "hours_without_accumulation") if row[name]]
    name, per_hour = next(each for each in TIMES if max(times, default=1.0) * each[1] >= 2 or each[1] == 3600)
    heads = "batch", f"{unit}s (90 % interval)", "steps", "k", name, f"{name} at k = 1*"
    yield "  " + " ".join(f"{head:>{width}}" for head, width in zip(heads, WIDTHS, strict=True))
    for row in answer["batches"]:
        low, high = row["tokens_range"]
        k, hours, fast = (row[name] for name in ("gradient_accumulation_steps", "hours", "hours_without_accumulation"))
        mark = {answer["global_batch_size"]: " this run", answer["advised_batch_size"]: " <-"}.get(
            row["batch_size"], ""
        )
        cells = [
            f"{row['batch_size']:,}",
            f"{row['tokens']:.2f} ({low:.2f}-{high:.2f})",
            f"{row['steps']:.2f}",
            k or "?",
        ]
        cells += ["?" if value is None else round_number(value * per_hour) for value in (hours, fast)]
        yield "  " + " ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True)) + mark
    yield "  * with k times as many devices, communication not counted"
