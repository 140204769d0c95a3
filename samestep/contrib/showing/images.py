"""Shows the images of a sample: small copies of them as data: URIs, which a page holds."""

import base64
import io
from typing import NamedTuple

from samestep.data.row_images import open_image

SIDE = 160
"""Pixels of the longer side of a small copy, at most."""


class ShownImage(NamedTuple):
    """An image of a sample, for people.

    Attributes:
        name: a number, its file, its size and its tokens, in words.
        uri: a small copy, a data: URI of a PNG that is written here; empty: it is not asked for.
    """

    name: str
    uri: str


def show_image(number: int, name: str, num_tokens: int, with_copy: bool) -> ShownImage:
    """Describe an image of a sample.

    Args:
        number: among the sample's, from 1.
        name: as `row_images.read_image` returns it.
        num_tokens: of the sample that stand for it.
        with_copy: whether a small copy is made.

    Raises:
        UsageError: it cannot be read any more.
    """
    image = open_image(name)
    file = "" if name[:5] == "data:" else f" {name.rpartition('/')[2]}"
    words = f"image {number}:{file or ' in the row'}, {image.width} x {image.height} pixels, {num_tokens} tokens"
    if not with_copy:
        return ShownImage(words, "")
    image.thumbnail((SIDE, SIDE))
    content = io.BytesIO()
    image.save(content, "PNG")
    return ShownImage(words, f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}")
