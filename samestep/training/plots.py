"""Pictures of predictions, drawn by matplotlib, which is imported only when one is drawn."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from samestep.data.predictions import sort_by_error

OUTCOMES = {"wrong": "#b3261e", "right": "#1f5fa8"}  # told apart by the colour-blind, too
COLUMNS, MAX_PICTURES = 8, 16  # of predictions: images in a row, and of a kind (right, wrong) at most
MAX_NAME = 28  # characters of the name below an image: its end
# Of a confusion matrix: the most classes for which cells hold numbers, and the most characters of a name
MAX_NUMBERED_CLASSES, NAME_LENGTH = 20, 16


def draw_held_out(source: Any, logits: np.ndarray) -> Any:
    """Draw what was read in held-out images: of the wrong ones those that the model is surest of, of the right ones the least.

    Args:
        source: `Images`.
        logits: floating [samples, classes], in its order.

    Returns:
        The figure, of matplotlib.
    """
    labels, read = source.store.labels[source.rows], logits.argmax(-1)
    order, num_wrong = sort_by_error(logits, labels), int((labels != read).sum())
    places = [*order[:num_wrong][:MAX_PICTURES].tolist(), *order[num_wrong:][:MAX_PICTURES].tolist()]
    micro_batch = source.collate([source.draw(0, place) for place in places])
    true, named = ([source.classes[values[place]] for place in places] for values in (labels, read))
    title = describe_counts(num_wrong, len(source), len(source))
    names = [source.name(place) for place in places]
    return draw_predictions(source.pictures(micro_batch["pixel_values"]), true, named, title, names)


def describe_counts(num_wrong: int, num_images: int, num_held_out: int) -> str:
    """Say of how many held-out images the predictions are, and how many are right.

    >>> describe_counts(3, 10, 10), describe_counts(3, 10, 90)
    ('10 held-out images: 7 right, 3 wrong', '10 of 90 held-out images: 7 right, 3 wrong')
    """
    count = f"{num_images:,}" + (f" of {num_held_out:,}" if num_held_out != num_images else "")
    return f"{count} held-out images: {num_images - num_wrong} right, {num_wrong} wrong"


def draw_predictions(
    pictures: np.ndarray,
    labels: Sequence[str],
    predictions: Sequence[str],
    title: str,
    names: Sequence[str] | None = None,
) -> Any:
    """Draw images with their predicted labels: wrong predictions first, then right ones, at most 16 of each.

    Args:
        pictures: float [images, height, width, channels] in [0, 1].
        labels, predictions: the true label of each image, and the predicted one.
        title: what stands above all of them.
        names: name of each image, which stands below it; None: it has none.

    Returns:
        The figure, of matplotlib.
    """
    from matplotlib.figure import Figure

    wrong_places = [place for place, pair in enumerate(zip(labels, predictions, strict=True)) if pair[0] != pair[1]]
    right_places = [place for place in range(len(labels)) if place not in wrong_places]
    selected_places = {"wrong": wrong_places[:MAX_PICTURES], "right": right_places[:MAX_PICTURES]}
    num_rows = {kind: -(-len(places) // COLUMNS) for kind, places in selected_places.items()}
    height, width = pictures.shape[1:3]
    per_row = (0.45 if names is None else 0.6) + 1.3 * min(1.5, height / width)
    total = sum(num_rows.values())
    figure = Figure(figsize=(1.45 * COLUMNS, per_row * total + 0.5), dpi=120, layout="constrained")
    figure.suptitle(title)
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
            if names is not None:
                panel.text(
                    0.5, -0.03, _shorten(names[place]), fontsize=6, ha="center", va="top", transform=panel.transAxes
                )
        first += num_rows[kind]
    return figure


def _shorten(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"…{name[1 - MAX_NAME :]}"


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
