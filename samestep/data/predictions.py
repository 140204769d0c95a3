"""Tables of what a classifier named samples: the wrong ones first, so that one sees where it errs, or a label."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MAX_CLASSES = 100
"""Classes up to which the probability of each is written: a file of more would have more numbers than words."""


def sort_by_error(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Sort samples: the wrong ones, the surest first, then the right ones, the least sure first.

    Args:
        logits: floating [samples, classes].
        labels: int64 [samples].

    Returns:
        int64 [samples], places in the order.
    """
    is_wrong = logits.argmax(-1) != labels
    sureness = logits.max(-1) - np.logaddexp.reduce(logits, -1)  # log of the probability
    return np.lexsort((np.where(is_wrong, -sureness, sureness), ~is_wrong))


def list_columns(
    classes: Sequence[str], logits: np.ndarray, columns: Mapping[str, Iterable[Any]]
) -> dict[str, Iterable[Any]]:
    """List the columns of a table: `prediction`, `probability` (the predicted class's), others, and `probability_CLASS` of each
    class, of up to `MAX_CLASSES`.

    Args:
        classes: the name of each.
        logits: floating [samples, classes].
        columns: others, name -> values.
    """
    probabilities = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    chosen = {
        "prediction": (classes[place] for place in probabilities.argmax(-1)),
        "probability": (f"{value:.6g}" for value in probabilities.max(-1)),
    }
    by_class = zip(classes, probabilities.T, strict=True) if len(classes) <= MAX_CLASSES else ()
    of_classes = {f"probability_{name}": (f"{value:.6g}" for value in values) for name, values in by_class}
    return {**chosen, **columns, **of_classes}


def write_table(path: Path, columns: Mapping[str, Iterable[Any]], order: np.ndarray | None = None) -> None:
    """Write a csv file of columns, its rows in the given order of places, int64 [rows]; None: as they are."""
    rows = list(zip(*columns.values(), strict=True))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows if order is None else [rows[place] for place in order])
