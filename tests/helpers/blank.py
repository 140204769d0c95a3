"""Pictures in the place of figures: drawing one takes as long as a tiny training, and laying one out a sixth of it."""

import io
import os
from collections.abc import Callable
from typing import Any

from samestep.recipe.extras import optional
from samestep.training import plots

figure, Image = optional("matplotlib.figure"), optional("PIL.Image")


def draw_nothing(set_attribute: Callable[[Any, str, Any], object] = setattr) -> None:
    """Replace what draws, in this process, by what returns or writes a blank picture.

    Args:
        set_attribute: `setattr`, or pytest's `monkeypatch.setattr`, which puts back.
    """
    if figure:
        set_attribute(figure.Figure, "savefig", _write_blank)
    set_attribute(plots, "plot_training", _make_blank)


def _write_blank(figure: Any, file: str | os.PathLike | Any, **_: Any) -> None:
    Image.new("L", (1, 1)).save(file, format="png")


def _make_blank(*_: Any, **__: Any) -> bytes:
    file = io.BytesIO()
    _write_blank(None, file)
    return file.getvalue()
