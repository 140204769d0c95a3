"""Charts as PNG pictures, drawn by matplotlib, which is imported when one is drawn."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

COLOURS = {"strong": "#3f8ccb", "weak": "#d0690b"}
OUTCOMES = {"wrong": "#b3261e", "right": "#1b6e3c"}
COLUMNS, SHOWN = 8, 16  # of predictions: images in a row, and of a kind at most
MARKERS = {"strong": "o", "weak": "s"}
NUMBERED, NAME_LENGTH = (
    20,
    16,
)  # of a confusion matrix: most classes with numbers in the micro-batches, characters of a name


def plot_growth(answer: dict[str, Any]) -> bytes:
    """Draw a recipe on more and more devices: samples per second, and beside it efficiency and waiting.

    Args:
        answer: what `python -m recipes scale RECIPE --on DEVICE --json` prints. What does not fit leaves a gap.

    Returns:
        The PNG file's content.
    """
    from matplotlib.figure import Figure

    rows = answer["rows"]
    placed = {kind: {row["num_devices"]: row[kind] for row in rows if row[kind]} for kind in COLOURS}
    first, numbers = next(iter(placed["strong"].items()))
    last = rows[-1]["num_devices"]
    figure = Figure(figsize=(12, 5), dpi=120, layout="constrained")
    figure.suptitle(f"{answer['recipe']} on {answer['device']}, predicted")
    speed, share = figure.subplots(1, 2)
    ideal = [numbers["samples_per_second"] * count / first for count in (first, last)]
    speed.plot([first, last], ideal, ":", color="0.4", label="as fast per device as at the first point")
    for kind, of in placed.items():
        style = {"color": COLOURS[kind], "marker": MARKERS[kind], "markersize": 5, "linewidth": 1.8}
        waiting = [each["exposed_communication"] / each["seconds"] for each in of.values()]
        speed.plot(of.keys(), [each["samples_per_second"] for each in of.values()], label=kind, **style)
        share.plot(of.keys(), [100 * each["efficiency"] for each in of.values()], label=f"{kind}: efficiency", **style)
        share.plot(
            of.keys(), [100 * part for part in waiting], "--", label=f"{kind}: waiting", **style, fillstyle="none"
        )
    speed.set(xscale="log", yscale="log", ylabel="samples per second")
    speed.set_title("Speed: the same step (strong), and one that grows with the devices (weak)", fontsize="medium")
    share.set(xscale="log", ylabel="%", ylim=(0, None))
    share.set_title("Efficiency per device, and the share of a step that waits", fontsize="medium")
    ticks = [row["num_devices"] for row in rows][:: -(-len(rows) // 7)]
    for axes in (speed, share):
        axes.set_xlabel("devices")
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    return _png(figure)


def plot_predictions(pictures: np.ndarray, wanted: Sequence[str], found: Sequence[str]) -> bytes:
    """Draw images with what was read in them: wrong ones first, then right ones, at most 16 of each.

    Args:
        pictures: float [images, height, width, channels] in [0, 1].
        wanted, found: the true label of each image, and the predicted one.

    Returns:
        The PNG file's content.
    """
    from matplotlib.figure import Figure

    wrong = [place for place, pair in enumerate(zip(wanted, found, strict=True)) if pair[0] != pair[1]]
    right = [place for place in range(len(wanted)) if place not in wrong]
    shown = {"wrong": wrong[:SHOWN], "right": right[:SHOWN]}
    num_rows = {kind: -(-len(places) // COLUMNS) for kind, places in shown.items()}
    height, width = pictures.shape[1:3]
    per_row = 0.45 + 1.3 * min(1.5, height / width)
    total = sum(num_rows.values())
    figure = Figure(figsize=(1.45 * COLUMNS, per_row * total + 0.5), dpi=120, layout="constrained")
    figure.suptitle(f"{len(wanted)} held-out images: {len(right)} right, {len(wrong)} wrong")
    axes = figure.subplots(total, COLUMNS, squeeze=False)
    for each in axes.flat:
        each.axis("off")
    first = 0
    for kind, places in shown.items():
        for number, place in enumerate(places):
            each = axes[first + number // COLUMNS, number % COLUMNS]
            each.imshow(pictures[place].squeeze(), cmap="gray", vmin=0, vmax=1)
            text = found[place] if kind == "right" else f"{found[place]} (is {wanted[place]})"
            each.set_title(text, fontsize="small", color=OUTCOMES[kind])
        first += num_rows[kind]
    return _png(figure)


def plot_confusion(counts: np.ndarray, names: Sequence[str]) -> bytes:
    """Draw which classes are taken for which: a row per true class, coloured by its shares; numbers for up to 20 classes.

    Args:
        counts: int [classes, classes]: samples of each true class (rows) that were predicted as each class (columns).
        names: of the classes; long ones are shortened.

    Returns:
        The PNG file's content.
    """
    from matplotlib.figure import Figure

    num_classes, total = len(counts), counts.sum()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    short = [name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…" for name in names]
    digits = len(str(counts.max())) if num_classes <= NUMBERED else 0
    micro_batch = max(0.09 * digits + 0.1, 0.32, 2.5 / num_classes)  # inches
    size = micro_batch * num_classes + 0.6 + 0.065 * max(map(len, short))
    figure = Figure(figsize=(size + 1, size), dpi=120, layout="compressed")
    figure.suptitle(f"accuracy {counts.trace() / max(total, 1):.1%}, {total:,} samples")
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    places = range(num_classes)
    axes.set_xticks(places, short, rotation=90 if max(map(len, short)) > 2 else 0)
    axes.set_yticks(places, short)
    axes.tick_params(labelsize="small")
    axes.set(xlabel="predicted", ylabel="true")
    if num_classes <= NUMBERED:
        for (row, column), count in np.ndenumerate(counts):
            colour = "0.7" if not count else "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(count), ha="center", va="center", fontsize="small", color=colour)
    figure.colorbar(image, ax=axes, label="share of the true class", shrink=0.8)
    return _png(figure)


def _png(figure: Any) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
