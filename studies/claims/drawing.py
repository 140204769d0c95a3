"""Charts as small PNG files."""

import io
from typing import Any

from PIL import Image

COLOURS = ("#3f8ccb", "#d0690b", "#1b6e3c", "#8e44ad", "#b3261e", "#555555")


def canvas(columns: int, title: str, height: float = 4.2) -> tuple[Any, list[Any]]:
    """A figure of so many axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * columns, height), dpi=80, layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for each in axes:
        each.grid(alpha=0.3)
    return figure, list(axes)


def png(figure: Any) -> bytes:
    """The file's content, in 64 colours."""
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(64).save(small, format="png", optimize=True)
    return small.getvalue()
