"""Images of rows of conversations: how rows name them, where they stand in turns, and how they are opened.

A row keeps of an image its path, or its content as a data: URI. In a turn with images the content is a list of parts, `text`
and `image`, as transformers' templates take it; all other contents are texts.
"""

import base64
import binascii
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from samestep.errors import UsageError
from samestep.recipe.extras import optional
from samestep.recipe.reading import find_fault

if TYPE_CHECKING:
    from PIL import Image
else:
    Image = optional("PIL.Image")

MARK = "<image>"
"""Mark of an image in the texts of LLaVA and ShareGPT."""
COLUMNS = ("images", "image")
PARTS = ("image", "image_url", "input_image")
"""Types of parts that hold an image."""
FIELDS = ("image", "url", "path", "image_url", "bytes", "base64", "data")
"""Fields of a part that hold it; the first one that it has counts."""
DATA = "data:image/*;base64,"
DATA_URI = re.compile(r"data:[\w.+*-]*/[\w.+*-]*(?:;[\w=.+-]+)*;base64,", re.I)
MAX_SHOWN = 80  # characters of a path in a message


def is_place(part: Mapping[str, Any]) -> bool:
    """Tell whether a part of the type `image` only says where an image of another column stands."""
    return all(part.get(name) is None for name in FIELDS)


def read_image(where: str, value: Any, folder: str | None) -> str:
    """Read what a row holds as an image: a path, a data: URI, bytes, Pillow's image, or an object with one of these.

    Args:
        where: it is, for messages.
        folder: to which paths are relative; None: this process's.

    Returns:
        an absolute path, or a data: URI.

    Raises:
        UsageError: none of these, or an address on the internet.
    """
    if isinstance(value, Mapping):
        fields = [name for name in ("bytes", *FIELDS) if value.get(name) is not None]
        if not fields:
            raise UsageError(f"{where}: an image has neither path nor bytes: name a file, or leave out the row")
        return read_image(where, value[fields[0]], folder)
    if isinstance(value, bytes | bytearray):
        return DATA + base64.b64encode(value).decode()
    if hasattr(value, "save") and hasattr(value, "mode"):  # Pillow's
        content = io.BytesIO()
        value.save(content, "PNG" if value.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16") else "TIFF")
        return read_image(where, content.getvalue(), folder)
    if not isinstance(value, str) or not value.strip():
        kind = "an empty text" if isinstance(value, str) else type(value).__name__
        raise UsageError(f"{where}: an image is {kind}, must be a path or bytes: name a file, or leave out the row")
    if value[:5].lower() == "data:":
        if not DATA_URI.match(value):
            raise UsageError(f"{where}: an image is a data: URI without base64: write it as data:image/png;base64,...")
        return value
    if re.match(r"(https?|s3|gs|hf|ftp)://", value, re.I):
        raise UsageError(
            f"{where}: an image is at {_shorten(value)}, but a training downloads none: save it as a file, and give its path"
        )
    path = value.removeprefix("file://")
    return os.path.abspath(os.path.join(folder or "", os.path.expanduser(path)))


def place_images(turns: Sequence[dict[str, Any]], images: Sequence[str], at_the_beginning: bool = False) -> None:
    """Put the images of a column into the turns, in place: where parts say so, or texts have the mark `<image>`, in order.

    Args:
        turns: of a row.
        images: of a column of the row.
        at_the_beginning: of the user's first turn, where nothing says where they stand.

    Raises:
        UsageError: marks and images are not as many.
    """
    contents = [split_marks(turn.get("content", "")) for turn in turns]
    num_marks = sum(part["type"] == "image" and is_place(part) for parts in contents for part in parts)
    user = next((place for place, turn in enumerate(turns) if turn["role"] == "user"), None)
    if not num_marks and images and at_the_beginning and user is not None:
        contents[user] = [*({"type": "image"} for _ in images), *contents[user]]
        num_marks = len(images)
    if num_marks != len(images):
        raise UsageError(
            f"its turns have {num_marks} marks {MARK}, but it has {len(images)} images beside them: give each image a mark, "
            "and each mark an image"
        )
    rest = iter(images)
    for turn, parts in zip(turns, contents, strict=True):
        if any(part["type"] == "image" for part in parts):
            turn["content"] = [
                {"type": "image", "image": next(rest)} if part["type"] == "image" and is_place(part) else part
                for part in parts
            ]


def split_marks(content: Any) -> list[dict[str, Any]]:
    """Split a content into parts: a text at its marks, which become parts without an image.

    >>> split_marks("<image>\\nwhat?")
    [{'type': 'image'}, {'type': 'text', 'text': '\\nwhat?'}]
    """
    if not isinstance(content, str):
        return [
            inner for part in content for inner in (split_marks(part["text"]) if part["type"] == "text" else [part])
        ]
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(content.split(MARK)):
        if number:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts


def list_texts(content: Any) -> list[str]:
    """List the texts of a content, in order; of one without images it is the whole."""
    if isinstance(content, list):
        return [part["text"] for part in content if part["type"] == "text"]
    return [content or ""]


def list_images(turns: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the images of turns, in order, as `read_image` returns them."""
    return [part["image"] for part in _iterate_parts(turns) if part["type"] == "image"]


def _iterate_parts(turns: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for turn in turns:
        if isinstance(turn.get("content"), list):
            yield from turn["content"]


def list_images_of_row(row: Mapping[str, Any]) -> list[str]:
    """List the images of a row, in the order of its turns."""
    return list_images([*row["prompt"], *(turn for answer in row["answers"] for turn in answer)])


def open_image(name: str) -> "Image.Image":
    """Open an image of `read_image`, upright, in RGB, of several frames the first; see `images.open_rgb`.

    Raises:
        UsageError: it cannot be read, or decoded.
    """
    from samestep.data import images

    is_content = name[:5] == "data:"
    shown = "an image in the row" if is_content else f"the image {_shorten(name)}"
    remedy = "mend it, or leave out the row"
    if not is_content and (fault := find_fault(name)):  # the opening of a pipe would wait for ever
        raise UsageError(f"{shown} {fault.rstrip('.')}, or leave out the row")
    try:
        file = io.BytesIO(base64.b64decode(name[name.index(",") + 1 :], validate=True)) if is_content else name
        return images.open_rgb(file)
    except MemoryError:
        raise
    except binascii.Error:
        raise UsageError(f"{shown} is no base64: {remedy}") from None
    except Exception as error:  # Pillow's decoders raise errors of any kind
        if isinstance(error, OSError) and error.errno is not None:
            raise UsageError(f"{shown} cannot be read ({error.strerror}): {remedy}") from None
        fault = images.explain(error).rstrip(".")
        raise UsageError(f"{shown} cannot be decoded ({fault}): {remedy}") from None


def mark_of(name: str) -> tuple[Any, ...]:
    """Return what changes when an image of `read_image` does: size and time of its file; of a content itself."""
    if name[:5] == "data:":
        return (name,)
    try:
        status = os.stat(name)
    except (OSError, ValueError):  # a name that no file can have, too
        return (name,)
    return name, status.st_size, status.st_mtime_ns


def _shorten(name: str) -> str:
    return name if len(name) <= MAX_SHOWN else f"...{name[3 - MAX_SHOWN :]}"
