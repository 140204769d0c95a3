"""The chart of a training, drawn by matplotlib, which is imported only when it is drawn."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from samestep.recipe import batch_size
from samestep.training.plots import NAME_LENGTH

NUM_WINDOWS = 10  # of a training, whose noise scales are drawn
LARGEST = 1e300  # value that is drawn as it is


def draw_training(
    steps: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    terms: Sequence[str],
    title: str,
    noises: Sequence[Mapping[str, Any]] = (),
) -> Any:
    """Draw the losses of a training over its steps, a panel for each that differs from the others, and the metrics beside; the
    noise scale of its gradient, too, where that was measured.

    Losses of steps are lines, with a centred mean over 1/50 of them; those of evaluations, the one before the first step
    included, are points.

    Args:
        steps, evaluations: lines of metrics.jsonl, in order.
        terms: names of the loss terms.
        title: what was trained on what.
        noises: lines of noise.jsonl, in order.

    Returns:
        The figure, of matplotlib.
    """
    from matplotlib.figure import Figure

    curves = {name: _columns(steps, name) for name in ["loss", *(f"{term}_loss" for term in terms)]}
    panels = {name: curve for name, curve in curves.items() if curve is not None}
    for name in list(panels)[1:]:
        if np.array_equal(panels[name][1], panels["loss"][1], equal_nan=True):
            del panels[name]  # the only term: its line would lie on that of the loss
    if not panels:
        panels = {"loss": (np.zeros(0), np.zeros(0))}
    names = dict.fromkeys(name for line in evaluations for name in line if name.startswith("eval_") and "/" not in name)
    metrics = [name for name in names if not name.endswith(("loss", "perplexity"))]
    measurements = batch_size.read_measurements(steps)
    layers = batch_size.estimate_layers(noises)
    place = len(panels) + bool(metrics)  # of the noise scale's panel, that of layers beside it
    num_panels = place + bool(measurements) + bool(layers)
    num_columns = min(2, num_panels)
    num_rows = -(-num_panels // num_columns)
    figure = Figure(figsize=(6.5 * num_columns, 0.5 + 4 * num_rows), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize="medium")
    grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    for axes, (name, (numbers, values)) in zip(grid, panels.items(), strict=False):
        if len(values):
            axes.plot(numbers, values, color="C0", lw=0.7, alpha=0.35)
            window = len(values) // 50 | 1  # odd: it has a middle
            half = window // 2  # steps of the mean before its middle
            means = np.convolve(values, np.full(window, 1 / window), mode="valid")
            label = (
                f"{name}, mean of {window} steps: {means[-1]:.4g} at the end"
                if window > 1
                else f"{name}: {values[-1]:.4g}"
            )
            axes.plot(numbers[half : half + len(means)], means, color="C0", lw=1.5, label=label)
        _plot_points(axes, evaluations, f"eval_{name}", "C1", "o")
        axes.set_ylabel(name)
    if metrics:
        for number, name in enumerate(metrics):
            _plot_points(grid[len(panels)], evaluations, name, f"C{number}", "o-")
        grid[len(panels)].set_ylabel("of held-out data")
    if measurements:
        batch = max(line["samples"] for line in steps if "samples" in line)
        named = {term: batch_size.read_measurements(steps, term) for term in terms}
        named = {term: values for term, values in named.items() if values}
        _plot_noise_scale(grid[place], {"": measurements} | named, batch)
    for number, axes in enumerate(grid):
        axes.set_visible(number < num_panels)
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    if layers:
        _plot_layers(grid[num_panels - 1], layers, max(line["samples"] for line in noises))
    return figure


def _columns(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return steps and values of those lines that have a value; a value that is null, not finite, is NaN. None: no line has.

    Values are cut off at `LARGEST`, as the differences of larger ones are no numbers any more, which axes need.
    """
    pairs = [(line["step"], line[name]) for line in lines if name in line]
    if not pairs:
        return None
    values = np.array([value for _, value in pairs], float)
    return np.array([step for step, _ in pairs]), np.clip(values, -LARGEST, LARGEST)


def _plot_points(axes: Any, evaluations: Sequence[Mapping[str, Any]], name: str, color: str, style: str) -> None:
    """Draw a number of every evaluation, with the last one in the legend."""
    if (curve := _columns(evaluations, name)) is not None:
        axes.plot(*curve, style, color=color, markersize=5, label=f"{name}: {curve[1][-1]:.4g} at the end")


def _plot_noise_scale(axes: Any, measurements: Mapping[str, Sequence[batch_size.Measurement]], batch: int) -> None:
    """Draw the noise scale over windows of a training, with 90 % intervals, beside the batch. What has no end is cut off.

    Args:
        measurements: of the whole gradient (no name), and of each loss term where there are several.
        batch: samples of a step, the most.
    """
    colours = ("C0", *(f"C{number}" for number in range(2, 10)))
    for name, color in zip(measurements, itertools.cycle(colours), strict=False):
        label = f"{name} alone" if name else "all terms" if len(measurements) > 1 else None
        for window in batch_size.split(measurements[name], NUM_WINDOWS):
            estimate, step = batch_size.estimate(window), np.mean([measurement.step for measurement in window])
            low, high = max(estimate.low, 0.1), min(estimate.high, 1000 * batch)
            axes.plot([step, step], [low, max(low, high)], color=color, lw=1.5)
            if np.isfinite(estimate.value) and estimate.value > 0:
                axes.plot([step], [estimate.value], "o", color=color, markersize=5, label=label)
                label = None
    axes.axhline(batch, color="C1", lw=1, label=f"global batch: {batch:,}")
    axes.set(yscale="log", ylabel="gradient noise scale, samples")


def _plot_layers(axes: Any, layers: Mapping[str, batch_size.Estimate], batch: int) -> None:
    """Draw the noise scale of each layer, with 90 % intervals, from the first layer down. What has no end is cut off."""
    for number, found in enumerate(layers.values()):
        low, high = max(found.low, 0.1), min(found.high, 1000 * batch)
        axes.plot([low, max(low, high)], [number, number], color="C0", lw=1.5)
        if np.isfinite(found.value) and found.value > 0:
            axes.plot([found.value], [number], "o", color="C0", markersize=4)
    axes.set_yticks(range(len(layers)), [name[-NAME_LENGTH:] for name in layers], fontsize="x-small")
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="gradient noise scale of each layer, samples, second half of the training")
