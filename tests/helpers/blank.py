"""Pictures in the place of figures: drawing one takes as long as a tiny training, and laying one out a sixth of it."""

import os
from collections.abc import Callable
from typing import Any

from rooms import MISSING

from samestep.recipe.extras import optional

figure, Image = optional("matplotlib.figure"), optional("PIL.Image")


def draw_nothing(set_attribute: Callable[[Any, str, Any], object] = setattr) -> None:
    """Replace what draws, in this process, by what returns or writes a blank picture.

    Args:
        set_attribute: `setattr`, or pytest's `monkeypatch.setattr`, which puts back.
    """
    if figure:
        set_attribute(figure.Figure, "savefig", _write_blank)
    if "samestep.contrib" not in MISSING:
        from samestep.contrib.publishing import charts

        set_attribute(charts, "draw_training", lambda *_, **__: Blank())


def _write_blank(figure: Any, file: str | os.PathLike | Any, **_: Any) -> None:
    Image.new("L", (1, 1)).save(file, format="png")


class Blank:
    """A figure that is a blank picture."""

    savefig = _write_blank
