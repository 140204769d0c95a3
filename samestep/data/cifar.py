"""CIFAR-10 (Krizhevsky, 2009) from its binary edition, as it lies in a folder: cifar-10-binary.tar.gz, unpacked.

Each file holds images one behind the other: a byte of label, 0 to 9, then 32 x 32 bytes of red, of green and of blue, by rows.
The pickled edition is refused, because a pickle is a program.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from samestep.data.arrow import hash_parts
from samestep.data.images import Files, Store
from samestep.errors import UsageError
from samestep.recipe.extras import optional
from samestep.recipe.reading import format_name, read_content

if TYPE_CHECKING:
    from PIL import Image
else:
    Image = optional("PIL.Image")

CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()
TRAINING, HELD_OUT = re.compile(r"data_batch_([0-9]+)\.bin"), "test_batch.bin"
SIDE = 32
ROW_BYTES = 1 + 3 * SIDE * SIDE
MAX_BYTES = 2**28
"""Bytes of a file that is read; the real ones have 30,730,000."""
CHUNK = 1000  # images that are hashed at once


class Cifar(Store):
    """The images of some files of CIFAR-10, in memory: 3,073 bytes each.

    Args:
        folder: holds the files.
        names: of the files, in the order of the rows.
        field: the recipe's field that names the folder, for messages.

    Raises:
        UsageError: a file that cannot be read, that ends within an image, or with a label above 9.
    """

    is_encoded = False

    def __init__(self, folder: str, names: list[str], field: str):
        self.description, self.classes = f"{field} {format_name(folder)}", CLASSES
        parts = [self._read(folder, name) for name in names]
        rows = np.concatenate(parts)
        self.labels, self.pixels = rows[:, 0].astype(np.int64), rows[:, 1:]
        self.notes = [f"CIFAR-10, {', '.join(names)}: {len(rows):,} images"]

    def _read(self, folder: str, name: str) -> np.ndarray:
        """Read a file, uint8 [images, 3073]."""
        content = read_content(Path(folder).expanduser() / name, f"{self.description}: {name}", MAX_BYTES)
        if not content or len(content) % ROW_BYTES:
            raise UsageError(
                f"{self.description}: {name} has {len(content):,} bytes, must have {ROW_BYTES:,} for each image: unpack "
                "cifar-10-binary.tar.gz again"
            )
        rows = np.frombuffer(content, np.uint8).reshape(-1, ROW_BYTES)
        if (rows[:, 0] >= len(CLASSES)).any():
            place = int(np.argmax(rows[:, 0] >= len(CLASSES)))
            raise UsageError(
                f"{self.description}: {name}, image {place} has the label {rows[place, 0]}, must be 0 to 9: give the files of "
                "cifar-10-binary.tar.gz (CIFAR-100 has two labels for each image)"
            )
        return rows

    def open(self, row: int) -> Image.Image:
        planes = self.pixels[row].reshape(3, SIDE, SIDE)  # red, green, blue
        return Image.fromarray(np.ascontiguousarray(planes.transpose(1, 2, 0)))

    def digest(self, rows: np.ndarray) -> str:
        content = hashlib.sha256()
        for first in range(0, len(rows), CHUNK):
            content.update(self.pixels[rows[first : first + CHUNK]].tobytes())
        return hash_parts(self.labels[rows].tobytes(), content.digest())


def is_cifar(folder: str) -> bool:
    """Tell whether a folder holds training images of CIFAR-10's binary edition.

    Raises:
        UsageError: it holds the pickled edition.
    """
    names = _list(folder)
    if "data_batch_1" in names and not any(map(TRAINING.fullmatch, names)):
        raise UsageError(
            f"train_dir {format_name(folder)} holds the pickled edition of CIFAR-10, and a pickle is a program: give the "
            "binary edition, cifar-10-binary.tar.gz"
        )
    return any(map(TRAINING.fullmatch, names))


def open_stores(train_dir: str, validation_dir: str | None) -> list[Store]:
    """Open the training images and the held-out ones: test_batch.bin of validation_dir, or else of train_dir, if it is there.

    A validation_dir without it has a folder per class.
    """
    found = [match for name in _list(train_dir) if (match := TRAINING.fullmatch(name))]
    names = [match[0] for match in sorted(found, key=lambda match: (int(match[1]), match[0]))]
    stores: list[Store] = [Cifar(train_dir, names, "train_dir")]
    if validation_dir is not None and HELD_OUT not in _list(validation_dir):
        return [*stores, Files(validation_dir, "validation_dir", CLASSES)]
    folder, field = (train_dir, "train_dir") if validation_dir is None else (validation_dir, "validation_dir")
    return [*stores, Cifar(folder, [HELD_OUT], field)] if HELD_OUT in _list(folder) else stores


def _list(folder: str) -> list[str]:
    """List the names in a folder; none of one that cannot be read, which `Files` reports."""
    try:
        return os.listdir(os.path.expanduser(folder))
    except (OSError, ValueError):
        return []
