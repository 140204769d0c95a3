"""Pictures in the place of figures: drawing one takes as long as a tiny training, and laying one out a sixth of it."""

import io
import os
from collections.abc import Callable
from typing import Any

import matplotlib.figure
from PIL import Image

from samestep.training import plots


def draw_nothing(set_attribute: Callable[[Any, str, Any], object] = setattr) -> None:
    """Replace what draws, in this process, by what returns or writes a blank picture.

    Args:
        set_attribute: `setattr`, or pytest's `monkeypatch.setattr`, which puts back.
    """
    set_attribute(matplotlib.figure.Figure, "savefig", _write_blank)
    set_attribute(plots, "plot_training", _make_blank)


def _write_blank(figure: Any, file: str | os.PathLike | Any, **_: Any) -> None:
    Image.new("L", (1, 1)).save(file, format="png")


def _make_blank(*_: Any, **__: Any) -> bytes:
    file = io.BytesIO()
    _write_blank(None, file)
    return file.getvalue()
