"""Charts as PNG pictures, drawn by matplotlib, which is imported only when a chart is drawn."""

import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from samestep.recipe import batch_size

OUTCOMES = {"wrong": "#b3261e", "right": "#1f5fa8"}  # told apart by the colour-blind, too
NUM_WINDOWS = 10  # of a training, whose noise scales are drawn
COLUMNS, MAX_PICTURES = 8, 16  # of predictions: images in a row, and of a kind (right, wrong) at most
LARGEST = 1e300  # value that is drawn as it is
# Of a confusion matrix: the most classes for which cells hold numbers, and the most characters of a name
MAX_NUMBERED_CLASSES, NAME_LENGTH = 20, 16


def plot_training(
    steps: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    terms: Sequence[str],
    title: str,
    noises: Sequence[Mapping[str, Any]] = (),
) -> bytes:
    """Return the PNG file of `draw_training`, which has the same arguments."""
    return _png(draw_training(steps, evaluations, terms, title, noises))


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


def plot_predictions(
    pictures: np.ndarray, labels: Sequence[str], predictions: Sequence[str], num_held_out: int | None = None
) -> bytes:
    """Return the PNG file of `draw_predictions`, which has the same arguments."""
    return _png(draw_predictions(pictures, labels, predictions, num_held_out))


def draw_predictions(
    pictures: np.ndarray, labels: Sequence[str], predictions: Sequence[str], num_held_out: int | None = None
) -> Any:
    """Draw images with their predicted labels: wrong predictions first, then right ones, at most 16 of each.

    Args:
        pictures: float [images, height, width, channels] in [0, 1].
        labels, predictions: the true label of each image, and the predicted one.
        num_held_out: images of which these are some; None: these are all.

    Returns:
        The figure, of matplotlib.
    """
    from matplotlib.figure import Figure

    wrong_places = [place for place, pair in enumerate(zip(labels, predictions, strict=True)) if pair[0] != pair[1]]
    right_places = [place for place in range(len(labels)) if place not in wrong_places]
    selected_places = {"wrong": wrong_places[:MAX_PICTURES], "right": right_places[:MAX_PICTURES]}
    num_rows = {kind: -(-len(places) // COLUMNS) for kind, places in selected_places.items()}
    height, width = pictures.shape[1:3]
    per_row = 0.45 + 1.3 * min(1.5, height / width)
    total = sum(num_rows.values())
    figure = Figure(figsize=(1.45 * COLUMNS, per_row * total + 0.5), dpi=120, layout="constrained")
    count = f"{len(labels):,}" + (f" of {num_held_out:,}" if num_held_out not in (None, len(labels)) else "")
    figure.suptitle(f"{count} held-out images: {len(right_places)} right, {len(wrong_places)} wrong")
    axes = figure.subplots(total, COLUMNS, squeeze=False)
    for panel in axes.flat:
        panel.axis("off")
    first = 0  # row of panels, [total, COLUMNS], at which the kind begins
    for kind, places in selected_places.items():
        for number, place in enumerate(places):
            panel = axes[first + number // COLUMNS, number % COLUMNS]
            panel.imshow(pictures[place].squeeze(), cmap="gray", vmin=0, vmax=1)
            text = predictions[place] if kind == "right" else f"{predictions[place]} (is {labels[place]})"
            panel.set_title(text, fontsize="small", color=OUTCOMES[kind])
        first += num_rows[kind]
    return figure


def plot_confusion(counts: np.ndarray, names: Sequence[str]) -> bytes:
    """Return the PNG file of `draw_confusion`, which has the same arguments."""
    return _png(draw_confusion(counts, names))


def draw_confusion(counts: np.ndarray, names: Sequence[str]) -> Any:
    """Draw a confusion matrix: a row per true class, coloured by its shares; with numbers for up to 20 classes.

    Args:
        counts: int [classes, classes]: samples of each true class (rows) that were predicted as each class (columns).
        names: name of each class; long ones are shortened.

    Returns:
        The figure, of matplotlib.
    """
    from matplotlib.figure import Figure

    num_classes, total = len(counts), counts.sum()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    short = [name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…" for name in names]
    digits = len(str(counts.max())) if num_classes <= MAX_NUMBERED_CLASSES else 0
    cell_size = max(0.09 * digits + 0.1, 0.32, 2.5 / num_classes)  # inches
    size = cell_size * num_classes + 0.6 + 0.065 * max(map(len, short))
    figure = Figure(figsize=(size + 1, size), dpi=120, layout="compressed")
    figure.suptitle(f"accuracy {counts.trace() / max(total, 1):.1%}, {total:,} samples")
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    places = range(num_classes)
    axes.set_xticks(places, short, rotation=90 if max(map(len, short)) > 2 else 0)
    axes.set_yticks(places, short)
    axes.tick_params(labelsize="small")
    axes.set(xlabel="predicted", ylabel="true")
    if num_classes <= MAX_NUMBERED_CLASSES:
        for (row, column), count in np.ndenumerate(counts):
            colour = "0.7" if not count else "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(count), ha="center", va="center", fontsize="small", color=colour)
    figure.colorbar(image, ax=axes, label="share of the true class", shrink=0.8)
    return figure


def _png(figure: Any) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
