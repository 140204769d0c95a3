"""A picture in the place of a figure: drawing one takes longer than a tiny training."""

import os
from typing import Any

from PIL import Image


def write_blank(figure: Any, file: str | os.PathLike | Any, **_: Any) -> None:
    """Write a blank picture, in the place of matplotlib's `Figure.savefig`."""
    Image.new("L", (1, 1)).save(file, format="png")
