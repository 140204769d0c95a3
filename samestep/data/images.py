"""Labelled images as samples: a folder per class, files of CIFAR-10, a dataset of the hub, or built-in ones.

A sample is drawn as (epoch, sample id) and decoded only where it is collated, because every process draws the whole global
batch. How it is cropped, flipped or shifted is drawn from (seed, epoch, sample id), so that its pixels are the same in any
micro-batch, process and worker.

Images that cannot be decoded are found before training: all are decoded once, in parallel, and the result is kept in the cache
until a file's size or time changes. So leaving them out gives the same dataset, and the same steps, on every layout.
"""

import contextlib
import functools
import hashlib
import io
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from transformers import BaseImageProcessor

from samestep._internals.datasets_rows import rows_fingerprint
from samestep.cut.order import sample_rng
from samestep.data import predictions
from samestep.data.arrow import datasets, hash_parts
from samestep.data.builtin import find_builtin, is_builtin
from samestep.data.documents import load_hub
from samestep.data.row_report import Problem, RowReport
from samestep.errors import RunError, UsageError, is_utf8
from samestep.recipe.extras import optional, require
from samestep.recipe.reading import find_fault, read_text
from samestep.recipe.tasks.image_classification import ImageClassification

if TYPE_CHECKING:
    import PIL
    from datasets.utils.tqdm import tqdm
    from PIL import Image, ImageOps
else:
    PIL = optional("PIL")
    Image, ImageOps, tqdm = optional("PIL.Image"), optional("PIL.ImageOps"), optional("datasets.utils.tqdm").tqdm

AUGMENTATION, HELD_OUT = 7, 8  # streams of random numbers (see order.sample_rng)
# Pillow looks at a file's content, not at its name, in the order of these. Not read are EPS and WMF, which are programs to be
# run, MPEG, which is a film, and BUFR, GRIB and HDF5, of which Pillow knows the beginning only. TGA has no mark that begins it.
FORMATS = tuple(
    "JPEG PNG BMP GIF TIFF WEBP JPEG2000 PPM AVIF BLP CUR DCX DDS DIB FITS FLI FTEX GBR ICNS ICO IM IPTC MSP PCD PCX PIXAR PSD "
    "QOI SGI SUN XBM XPM TGA".split()
)
USUAL_SUFFIXES = (".png", ".jpg", ".tif", ".gif", ".webp", ".bmp")  # for messages
DARK = 4095  # largest value of 12 bits: cameras write them into 16, where they are nearly black
CENTRE = 224 / 256  # share of the short side that held-out images are cropped to, where training crops at random
SCALE, RATIO, ATTEMPTS = (0.08, 1.0), (3 / 4, 4 / 3), 10  # of random crops: share of the area, width / height
PLANNED = 0.05  # by which the images may differ from num_train_samples, by which a run is planned, before it is said
MAX_SCALED = 2**24  # pixels of an image that is scaled whole before it is cropped
MAX_NAMES = 10  # names in a message at most
CHUNK = 16  # images that a thread verifies at once
MAX_RESULTS = 2**29  # bytes of the file that keeps the results of verified images


class ImageSample(NamedTuple):
    """One sample of one epoch, not decoded yet."""

    epoch: int
    sample_id: int

    @property
    def length(self) -> int:
        """1: all images cost the same."""
        return 1


class Store:
    """A source of labelled images.

    Attributes:
        description: names the source in messages.
        classes: name of each label.
        labels: int64 [images].
        columns, unused: names of columns that are read, and of others.
        notes: lines on the source for people.
        is_encoded: whether images have to be decoded, which may fail.
    """

    description: str
    classes: list[str]
    labels: np.ndarray
    columns: Sequence[str] = ()
    unused: Sequence[str] = ()
    notes: Sequence[str] = ()
    is_encoded: bool = True

    def open(self, row: int) -> Image.Image:
        """Open an image, which Pillow may not have decoded yet."""
        raise NotImplementedError

    def name(self, row: int) -> str:
        """Return the name of an image, for messages."""
        return f"row {row}"

    def hash_content(self, row: int) -> str:
        """Return 16 hex digits of the SHA-256 of an image as it is encoded."""
        raise NotImplementedError

    def digest(self, rows: np.ndarray) -> str:
        """Return 16 hex digits of a SHA-256 of the content of these rows, whatever folder holds them."""
        raise NotImplementedError


class Images:
    """The samples of one part of a dataset.

    Args:
        store: the source of the images.
        rows: int64 [samples], the store's row of each sample.
        recipe: gives the size of images, their augmentation and the seed.
        training: whether samples are augmented.
    """

    max_length = 1

    def __init__(self, store: Store, rows: np.ndarray, recipe: ImageClassification, *, training: bool):
        self.store, self.rows, self.classes = store, rows, store.classes
        self.row_reports: list[RowReport] = []
        self.seed = recipe.seed if training else None
        self.planned_size = recipe.num_train_samples if training else None
        self.augmentation = recipe.augmentation
        self.height, self.width, self.num_channels = recipe.image_height, recipe.image_width, recipe.num_channels
        mean, std = np.array(recipe.image_mean), np.array(recipe.image_std)
        # factor and offset [width * channels], for a whole row of pixels: numpy is slow over an axis as short as the channels
        self.factor, self.offset = (
            np.tile(values, self.width).astype(np.float32) for values in (1 / (255 * std), -mean / std)
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        """Say how many images there are, and in what they differ from the recipe."""
        text = f"{len(self):,} images of {len(self.classes)} classes"
        if self.planned_size is None or abs(len(self) - self.planned_size) <= PLANNED * self.planned_size:
            return text
        return f"{text}; num_train_samples is {self.planned_size:,}, but an epoch has {len(self):,}"

    @property
    def majority_accuracy(self) -> float:
        """The accuracy of the most frequent class for every image."""
        return float(np.unique(self.store.labels[self.rows], return_counts=True)[1].max() / len(self))

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of all that the samples are made of: names, sizes and labels of files, the content of anything else."""
        return {"images": self.store.digest(self.rows)}

    def draw(self, epoch: int, sample_id: int) -> ImageSample:
        """Return the number of an image and the epoch; nothing is read."""
        return ImageSample(epoch, sample_id)

    def longest(self) -> ImageSample:
        """Return any sample: they all cost the same."""
        return ImageSample(0, 0)

    def collate(self, samples: list[ImageSample]) -> dict[str, torch.Tensor | None]:
        """Make a micro-batch of S samples; no samples make a micro-batch of no rows.

        Returns:
            pixel_values: float32 [S, channels, height, width], contiguous in channels_last; in each channel
                (value - mean) / std of values in [0, 1].
            labels: int64 [S].
            counts: int64 [1], S.

        Raises:
            RunError: an image that can no longer be read.
        """
        shape = (len(samples), self.height, self.width, self.num_channels)
        values = np.empty((*shape[:2], self.width * self.num_channels), np.float32)

        def fill(places: range) -> None:
            for place in places:
                np.multiply(self._pixels(samples[place]).reshape(values.shape[1:]), self.factor, out=values[place])
                values[place] += self.offset

        # Pillow lets other threads run while it decodes. A DataLoader's worker has one thread.
        num_threads = torch.get_num_threads() if self.store.is_encoded else 1
        with ThreadPoolExecutor(num_threads) as pool:
            # Thread i of n fills the rows i, i + n, i + 2 n, ... of `values`
            list(pool.map(fill, (range(first, len(samples), num_threads) for first in range(num_threads))))
        rows = self.rows[np.array([sample.sample_id for sample in samples], np.int64)]
        return {
            "pixel_values": torch.from_numpy(values.reshape(shape)).permute(0, 3, 1, 2),
            "labels": torch.from_numpy(self.store.labels[rows]),
            "counts": torch.tensor([len(samples)]),
        }

    def pictures(self, pixel_values: torch.Tensor) -> np.ndarray:
        """Turn a micro-batch's pixel_values into pictures to look at, float [S, height, width, channels] in [0, 1]."""
        factor, offset = (row[: self.num_channels] for row in (self.factor, self.offset))
        return np.clip((pixel_values.permute(0, 2, 3, 1).numpy() - offset) / factor / 255, 0, 1)

    def write(self, path: Path, logits: np.ndarray) -> None:
        """Write a csv file of what was read in each image, the wrong ones first, with columns as of `predictions.list_columns`.

        Args:
            path: where the file goes.
            logits: floating [samples, classes].
        """
        labels = self.store.labels[self.rows]
        columns = {"label": [self.classes[label] for label in labels], "image": map(self.name, range(len(self)))}
        table = predictions.list_columns(self.classes, logits, columns)
        predictions.write_table(path, table, predictions.sort_by_error(logits, labels))

    def name(self, place: int) -> str:
        """Return the name of a sample's image, for people."""
        return self.store.name(int(self.rows[place]))

    def _pixels(self, sample: ImageSample) -> np.ndarray:
        """Decode, crop, resize and augment an image, uint8 [height, width, channels]."""
        row = int(self.rows[sample.sample_id])
        try:
            image = _decode(self.store.open(row), self.num_channels)
        except Exception as error:
            raise RunError(
                f"{self.store.description}: {self.store.name(row)} was an image at the start and is none now "
                f"({explain(error)}): restore it and resume"
            ) from error
        rng = None if self.seed is None else sample_rng(self.seed, AUGMENTATION, *sample)
        crops = self.augmentation == "imagenet"
        size = image.size
        share = CENTRE if crops else 1.0
        if crops and rng is not None:
            box: tuple[float, ...] = _random_box(size[0], size[1], rng)
        else:
            box = _centre_box(size[0], size[1], self.width, self.height, share)
        if rng is None and self.width == self.height:
            image = _crop_as_saved(image, self.width, share)
        else:
            image = image.resize((self.width, self.height), Image.Resampling.BILINEAR, box)
        pixels = np.asarray(image).reshape(self.height, self.width, self.num_channels)
        if rng is None or self.augmentation == "none":
            return pixels
        if not crops:
            pixels = _shift(pixels, rng)
        is_flipped = self.augmentation != "shift" and rng.random() < 0.5
        return pixels[:, ::-1] if is_flipped else pixels


def build(
    recipe: ImageClassification, num_workers: int | None = None, on_bad_row: str = "refuse"
) -> tuple[Images, Images | None]:
    """Build the recipe's training and held-out samples, see `samestep.data`.

    Held-out samples come from validation_dir, or from the hub dataset's split `validation` or else `test`; else they are
    validation_fraction of the images, drawn by the seed. Every process of a run must see the same files. All images are decoded
    once.
    """
    require("images", "training on images")
    stores = _open(recipe)
    store = stores[0]
    if len(store.classes) == 1:
        raise UsageError(
            f"{store.description} has a single class, {_abbreviate(store.classes)}: nothing can be learned; add another"
        )
    if len(store.classes) != recipe.num_labels:
        raise UsageError(
            f"num_labels is {recipe.num_labels}, but {store.description} has {len(store.classes)} classes "
            f"({_abbreviate(store.classes)}): set num_labels to {len(store.classes)}"
        )
    found = [_inspect_all(source, num_workers) for source in stores]
    lines = [line for pair in zip(stores, found, strict=True) if (line := _describe_bad_rows(*pair))]
    if lines and on_bad_row == "refuse":
        raise UsageError(f"{'; '.join(lines)}: mend or remove them, or set on_bad_row to skip")
    reports = [_report(*pair, recipe) for pair in zip(stores, found, strict=True) if pair[0].is_encoded]
    rows = [_find_good_rows(*pair) for pair in zip(stores, found, strict=True)]
    counted = zip(reports, stores, rows, strict=False)  # a built-in one has no report
    reports = [one._replace(notes=[*one.notes, _describe_classes(source, good)]) for one, source, good in counted]
    if len(stores) == 1:
        rows = [*_split(rows[0], recipe.validation_fraction, recipe.seed)]
        stores = stores * 2
        reports = [report._replace(num_held_out=len(rows[1])) for report in reports]
    if line := _describe_leak(found, rows):
        reports[-1] = reports[-1]._replace(notes=[*reports[-1].notes, line])
    train = Images(stores[0], rows[0], recipe, training=True)
    train.row_reports = reports
    if not len(rows[1]):
        return train, None
    return train, Images(stores[1], rows[1], recipe, training=False)


def _describe_repeats(store: Any, found: "Found") -> list[str]:
    """Say in lines how many images come more than once, byte for byte: of one class, and of several."""
    groups: dict[str, list[int]] = {}
    for row, (_, notes) in found.items():
        for note in notes:
            if note.startswith(HASH):
                groups.setdefault(note, []).append(row)
    repeated = [group for group in groups.values() if len(group) > 1]
    if not repeated:
        return []
    mixed = [group for group in repeated if len(set(store.labels[group].tolist())) > 1]
    same = [group for group in repeated if group not in mixed]
    kinds = {"images that come more than once": same, "equal images of several classes, of which one is right": mixed}
    return [
        f"{kind}: {sum(map(len, groups)):,} ({' and '.join(map(store.name, groups[0][:2]))})"
        for kind, groups in kinds.items()
        if groups
    ]


def _find_hashes(found: "Found", rows: np.ndarray) -> list[str]:
    """Find the hash of the content of each of these rows; none where images were not verified."""
    return [note for row in rows.tolist() for note in found.get(row, (None, []))[1] if note.startswith(HASH)]


def _describe_leak(found: "Sequence[Found]", rows: Sequence[np.ndarray]) -> str | None:
    """Say how many held-out images are in the training, too, byte for byte; None: none is."""
    train, held_out = _find_hashes(found[0], rows[0]), _find_hashes(found[-1], rows[1])
    both = set(train) & set(held_out)
    num_both = sum(each in both for each in held_out)
    return f"held out AND trained on: {num_both:,} of {len(held_out):,} held-out images" if num_both else None


def _describe_classes(store: "Store", rows: np.ndarray) -> str:
    """Say how many images each class has."""
    counts = Counter(store.labels[rows].tolist())
    return f"classes: {_abbreviate([f'{name} ({counts[label]:,})' for label, name in enumerate(store.classes)])}"


def _describe_sizes(sizes: Sequence[str], recipe: ImageClassification) -> list[str]:
    """Say in a line what images of other sizes than the recipe's become; nothing where there are none."""
    pairs = sorted({tuple(map(int, SIZE.fullmatch(size).groups())) for size in sizes}, key=math.prod)
    if not pairs or pairs == [(recipe.image_width, recipe.image_height)]:
        return []
    (w, h), (widest, highest) = pairs[0], pairs[-1]
    seen = f"{w} x {h}" if len(pairs) == 1 else f"{len(pairs):,} sizes, {w} x {h} to {widest} x {highest}"
    part = "a crop of them, drawn anew in each epoch," if recipe.augmentation == "imagenet" else "their middle"
    return [
        f"images of {seen}: {part} becomes {recipe.image_width} x {recipe.image_height} (image_width x image_height)"
    ]


def _report(store: Any, found: "Found", recipe: ImageClassification) -> RowReport:
    """Report on the images of a store. Raises UsageError where all of 16 bits are of 12, nearly black."""
    notes = Counter(note for _, names in found.values() for note in names if not note.startswith(HASH))
    if notes[SIXTEEN_BITS] and notes[SIXTEEN_BITS] == notes[DARK_BITS]:
        raise UsageError(
            f"{store.description}: all {notes[SIXTEEN_BITS]:,} images of 16 bits have values up to {DARK:,} at most, but "
            "65,535 is white, so that they would be nearly black. Multiply them by 16, or write them in 8 bits"
        )
    bad = [Problem(store.name(row), fault) for row, (fault, _) in found.items() if fault is not None]
    own = (COLOURED, DARK_BITS)
    lines = [
        f"images that {note}: {count:,}" for note, count in notes.items() if note not in own and not SIZE.match(note)
    ]
    if notes[COLOURED] and recipe.num_channels == 1:
        lines.append(f"images in colour, which become grey (num_channels is 1): {notes[COLOURED]:,}")
    lines += _describe_repeats(store, found)
    lines += _describe_sizes([note for note in notes if SIZE.match(note)], recipe)
    return RowReport(
        store.description,
        num_read=len(store.labels),
        num_used=len(store.labels) - len(bad),
        bad=bad,
        columns=store.columns,
        unused=dict.fromkeys(store.unused, len(store.labels)),
        notes=[*store.notes, *lines],
    )


def _find_good_rows(store: "Store", found: "Found") -> np.ndarray:
    """Find the rows of the images that can be decoded. Raises UsageError where a class has none."""
    bad = [row for row, (fault, _) in found.items() if fault is not None]
    rows = np.setdiff1d(np.arange(len(store.labels)), bad)
    if empty_labels := set(store.labels.tolist()) - set(store.labels[rows].tolist()):
        names = _abbreviate([store.classes[label] for label in sorted(empty_labels)])
        raise UsageError(f"{store.description}: no image of {names} can be decoded: mend some, or remove the class")
    return rows


def _open(recipe: ImageClassification) -> list[Store]:
    """Open the images to train on, and the held-out ones if they are separate."""
    if recipe.train_dir is not None:
        from samestep.data import cifar  # here: it imports this module

        if cifar.is_cifar(recipe.train_dir):
            return cifar.open_stores(recipe.train_dir, recipe.validation_dir)
        store = Files(recipe.train_dir, "train_dir")
        if recipe.validation_dir is None:
            return [store]
        return [store, Files(recipe.validation_dir, "validation_dir", store.classes)]
    if is_builtin(recipe.dataset_name):
        return [find_builtin("images", recipe.dataset_name)()]
    return _hub(recipe.dataset_name, recipe.dataset_config_name)


def _split(rows: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split rows into those to train on and those to hold out, in their old order; one or more, unless the fraction is 0."""
    if fraction == 0:
        return rows, rows[:0]
    number = max(1, round(len(rows) * fraction))
    if number >= len(rows):
        raise UsageError(f"validation_fraction {fraction} of {len(rows)} images leaves none to train on: lower it")
    order = sample_rng(seed, HELD_OUT, 0, 0).permutation(len(rows))
    return rows[np.sort(order[number:])], rows[np.sort(order[:number])]


# ---------------------------------------------------------------------------------------------------------------------
# Pixels


def _decode(image: Image.Image, num_channels: int) -> Image.Image:
    """Decode an image upright, in 1 or 3 channels of 8 bits: of several frames the first.

    Transparency is dropped, as torchvision does. Of 16 bits the upper 8 are taken; floating numbers go from 0 (black) to 1,
    whole numbers of 32 bits from 0 to 255.

    Raises:
        ValueError: the image has more pixels than Pillow takes for harmless, or numbers outside of these ranges.
    """
    with image:
        if image.width * image.height > Image.MAX_IMAGE_PIXELS:
            raise ValueError(f"{image.width:,} x {image.height:,} pixels, more than {Image.MAX_IMAGE_PIXELS:,}")
        ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I;16") or image.mode in ("I", "F"):  # Pillow would cut off values above 255
            return _decode(Image.fromarray(_scale_levels(np.asarray(image), image)), num_channels)
        if image.mode == "P" and "transparency" in image.info:
            return image.convert("RGBA").convert("RGB" if num_channels == 3 else "L")  # Pillow warns otherwise
        mode = "RGB" if num_channels == 3 else "L"
        if image.mode != mode:
            return image.convert(mode)
        image.load()  # before the file is closed
        return image


def open_rgb(file: str | io.BytesIO) -> Image.Image:
    """Open an image of any format that is read, upright, in 3 channels of 8 bits, see `_decode`."""
    return _decode(Image.open(file, formats=_find_formats()), 3)


def _scale_levels(levels: np.ndarray, image: Image.Image) -> np.ndarray:
    """Scale grey levels to uint8, by the range of their kind.

    Raises:
        ValueError: levels outside of it.
    """
    is_scaled = image.mode == "I" and image.format in ("PNG", "PPM")  # PPM: to 16 bits
    if image.mode.startswith("I;16") or is_scaled:
        return (levels >> 8).astype(np.uint8)
    white = 1 if image.mode == "F" else 255
    low, high = float(levels.min()), float(levels.max())
    if not (low >= 0 and high <= white):  # NaN is neither
        kind = "floating numbers" if image.mode == "F" else "whole numbers of 32 bits"
        raise ValueError(f"{kind} from {low:g} to {high:g}, must be 0 (black) to {white} (white)")
    return np.rint(levels * (255 / white)).astype(np.uint8)


@functools.cache
def _find_suffixes() -> tuple[str, ...]:
    """Find the suffixes of the files that are read: those of `FORMATS` which this Pillow knows."""
    Image.init()
    return tuple(sorted(suffix for suffix, name in Image.registered_extensions().items() if name in _find_formats()))


@functools.cache
def _find_formats() -> tuple[str, ...]:
    """Find the formats that are read, as this Pillow knows them."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _random_box(
    width: int, height: int, rng: np.random.Generator, shares: tuple[float, float] = SCALE
) -> tuple[int, int, int, int]:
    """Draw left, top, right and bottom of a random crop, as torchvision's RandomResizedCrop does.

    The crop has 8 % to 100 % of the area, and width / height from 3/4 to 4/3 with uniform logarithm. If ten draws do not fit,
    it is the largest crop in the middle within these ratios.
    """
    for _ in range(ATTEMPTS):
        area = width * height * rng.uniform(*shares)
        ratio = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, max(1, round(height * RATIO[1]))), min(height, max(1, round(width / RATIO[0])))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def _centre_box(
    width: int, height: int, target_width: int, target_height: int, share: float
) -> tuple[float, float, float, float]:
    """Compute left, top, right and bottom of the crop in the middle, of the target's shape, `share` times as wide as fits."""
    scale = share * min(width / target_width, height / target_height)
    w, h = target_width * scale, target_height * scale
    left, top = max(0.0, (width - w) / 2), max(0.0, (height - h) / 2)
    return left, top, min(float(width), left + w), min(float(height), top + h)


def _crop_as_saved(image: Image.Image, side: int, share: float) -> Image.Image:
    """Make the square that the saved processor sees: an image's short side is scaled to side / share, then it is cropped."""
    width, height = image.size
    short = int(side / share)
    w, h = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
    left, top = (w - side) // 2, (h - side) // 2
    if w * h <= MAX_SCALED:
        scaled = image.resize((w, h), Image.Resampling.BILINEAR)
        return scaled.crop((left, top, left + side, top + side))
    # A strip, which would take much room: the same but for a rounding of its levels
    box = left * width / w, top * height / h, (left + side) * width / w, (top + side) * height / h
    return image.resize((side, side), Image.Resampling.BILINEAR, box)


def _shift(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Move an image, uint8 [height, width, channels], at random by up to an eighth of each side; zeros move in."""
    result = np.zeros(pixels.shape, np.uint8)
    height, width = pixels.shape[:2]
    # `window` is the part of the image that stays inside when it moves `down` and `right`, either of which may be negative
    down = int(rng.integers(-(height // 8), height // 8 + 1))
    right = int(rng.integers(-(width // 8), width // 8 + 1))
    window = pixels[max(0, -down) : height - max(0, down), max(0, -right) : width - max(0, right)]
    result[max(0, down) :, max(0, right) :][: window.shape[0], : window.shape[1]] = window
    return result


def make_processor(recipe: ImageClassification) -> BaseImageProcessor:
    """Make the image processor of transformers' ResNets, to be saved beside the model.

    It treats images as held-out ones are treated here, if the recipe's images are squares; else it makes them squares.
    """
    from transformers.models.bit import image_processing_pil_bit  # here: needs Pillow

    side = recipe.image_height
    return image_processing_pil_bit.BitImageProcessorPil(
        size={"shortest_edge": int(side / (CENTRE if recipe.augmentation == "imagenet" else 1.0))},
        crop_size={"height": side, "width": side},
        do_convert_rgb=False,  # a recipe may have grey images
        resample=Image.Resampling.BILINEAR,
        image_mean=list(recipe.image_mean),
        image_std=list(recipe.image_std),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Stores


class Files(Store):
    """A folder of classes: CLASS/NAME.png, or another suffix that Pillow reads. Classes and names are sorted.

    Files that are no images by their suffixes, and hidden ones, are not read; `notes` say how many there are.

    Args:
        folder: holds the class folders.
        field: the recipe's field that names the folder, for messages.
        classes: name of each label; None: the class folders.

    Raises:
        UsageError: a folder that cannot be read, no class folder, a class folder without images, or one not in `classes`.
    """

    def __init__(self, folder: str, field: str, classes: list[str] | None = None):
        self.folder, self.description = os.path.abspath(os.path.expanduser(folder)), f"{field} {folder}"
        self.notes: list[str] = []
        suffixes, others = _find_suffixes(), Counter()
        entries = self._list(".", others)
        class_names = [entry.name for entry in entries if self._is_folder(entry)]
        if not class_names:
            num_loose = sum(entry.name.lower().endswith(suffixes) for entry in entries)
            raise UsageError(
                f"{self.description} has no class folder ({num_loose} images lie in it directly): put each image into "
                "CLASS/NAME"
            )
        for entry in entries:
            if entry.name not in class_names:
                others[f"{_suffix(entry.name)} beside the class folders"] += 1
        self.classes = class_names if classes is None else classes
        self.names, self.sizes, self.times = [], [], []
        problems, labels = [], []
        if invalid_names := [name for name in class_names if not is_utf8(name)]:
            names = _abbreviate(invalid_names)
            problems.append(f"{self.description} has classes whose names are not UTF-8: {names}: rename them")
        if unknown_names := sorted(set(class_names) - set(self.classes)):
            names = _abbreviate(unknown_names)
            problems.append(f"{self.description} has classes that train_dir lacks: {names}: remove or rename them")
        for name in sorted(set(class_names) & set(self.classes)):
            class_entries = self._list(name, others)
            folders = [entry.name for entry in class_entries if self._is_folder(entry)]
            files = [entry for entry in class_entries if entry.name not in folders]
            images = [entry for entry in files if entry.name.lower().endswith(suffixes)]
            others.update(_suffix(entry.name) for entry in files if not entry.name.lower().endswith(suffixes))
            if folders:
                problems.append(
                    f"{self.description}: class {name} holds folders ({_abbreviate(folders)}), but images must be CLASS/NAME: "
                    "give the folder that holds the classes, or move the images up"
                )
            elif not images:
                problems.append(
                    f"{self.description}: class {name} holds no image ({len(class_entries)} other files): remove it, or add "
                    f"images ({', '.join(USUAL_SUFFIXES)} or another suffix that Pillow reads)"
                )
            for entry in images:
                self.names.append(f"{name}/{entry.name}")
                status = self._try(entry.stat, self.names[-1])
                self.sizes.append(status.st_size)
                self.times.append(status.st_mtime_ns)
                if not stat.S_ISREG(status.st_mode):  # reading it could wait for ever
                    problems.append(
                        f"{self.description}: {self.names[-1]} is a device, a pipe or a socket, not a regular file: remove it"
                    )
            labels += [self.classes.index(name)] * len(images)
        if problems:
            raise UsageError(problems)
        if len(kinds_read := Counter(map(_suffix, self.names))) > 1:
            self.notes.append(
                f"files read: {', '.join(f'{count:,} {kind}' for kind, count in kinds_read.most_common())}"
            )
        if others:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in others.most_common(MAX_NAMES))
            more = sum(others.values()) - sum(count for _, count in others.most_common(MAX_NAMES))
            self.notes.append(
                f"NOT read, as no images by their suffixes: {kinds}{f' and {more:,} more' if more else ''}"
            )
        self.labels = np.array(labels, np.int64)

    def _is_folder(self, entry: os.DirEntry) -> bool:
        return self._try(entry.is_dir, os.path.relpath(entry.path, self.folder))

    def _list(self, name: str, others: Counter[str]) -> list[os.DirEntry]:
        """List the entries of a folder inside, sorted, without hidden ones, which are counted in `others`."""
        entries = self._try(lambda: list(os.scandir(os.path.join(self.folder, name))), name)
        if num_hidden := sum(entry.name.startswith(".") for entry in entries):
            others["hidden"] += num_hidden
        return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)

    def _try(self, call: Callable[[], Any], name: str) -> Any:
        try:
            return call()
        except OSError as error:
            entry_name = "it" if name == "." else name
            raise UsageError(
                f"{self.description}: {entry_name} cannot be read ({error.strerror}): check the path and its permissions"
            ) from None

    def open(self, row: int) -> Image.Image:
        return Image.open(os.path.join(self.folder, self.names[row]), formats=_find_formats())

    def name(self, row: int) -> str:
        return self.names[row]

    def digest(self, rows: np.ndarray) -> str:
        lines = (f"{self.names[row]}\0{self.sizes[row]}\0{self.labels[row]}" for row in rows.tolist())
        return hash_parts("\n".join(lines).encode(errors="surrogateescape"))

    @property
    def place(self) -> str:
        """Key of the cache of verified images."""
        return self.folder

    def hash_content(self, row: int) -> str:
        with open(os.path.join(self.folder, self.names[row]), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]

    def marks(self) -> list[str]:
        """Return a mark of every row, which changes when the image does."""
        return [f"{size} {time}" for size, time in zip(self.sizes, self.times, strict=True)]


class Rows(Store):
    """A split of a dataset on the hub: the column that holds images and the one that holds classes.

    Raises:
        UsageError: no such columns, several, or a row without a label.
    """

    def __init__(self, dataset: datasets.Dataset, name: str, split: str):
        self.description = f"dataset_name {name!r}, split {split}"
        image, label = (
            self._column(dataset.features, kind, usual_name)
            for kind, usual_name in ((datasets.Image, "image"), (datasets.ClassLabel, "label"))
        )
        self.classes, self.image = dataset.features[label].names, image
        self.columns = (image, label)
        self.unused = [name for name in dataset.features if name not in self.columns]
        self.labels = dataset.select_columns(label).with_format("numpy")[:][label].astype(np.int64)
        if not len(self.labels) or self.labels.min() < 0 or self.labels.max() >= len(self.classes):
            raise UsageError(
                f"{self.description}: it is empty, or column {label!r} lacks labels: give a labelled dataset"
            )
        self.images = dataset.select_columns(image).cast_column(image, datasets.Image(decode=False))
        self.place = f"{name} {split}"

    def _column(self, features: datasets.Features, kind: type, usual_name: str) -> str:
        """Find the only column of a kind, or the one with the usual name."""
        columns = [name for name, feature in features.items() if isinstance(feature, kind)]
        if len(columns) != 1 and usual_name not in columns:
            raise UsageError(
                f"{self.description}: {len(columns)} columns are {kind.__name__} ({_abbreviate(columns) or 'none'}), must be "
                f"one, or one of them named {usual_name!r}"
            )
        return usual_name if usual_name in columns else columns[0]

    def _bytes(self, row: int) -> bytes:
        record = self.images[row][self.image]
        if record["bytes"] is not None:
            return record["bytes"]
        if fault := find_fault(record["path"]):  # others wrote the path
            raise ValueError(f"{record['path']} {fault}")
        return Path(record["path"]).read_bytes()

    def open(self, row: int) -> Image.Image:
        return Image.open(io.BytesIO(self._bytes(row)), formats=_find_formats())

    def hash_content(self, row: int) -> str:
        return hashlib.sha256(self._bytes(row)).hexdigest()[:16]

    def digest(self, rows: np.ndarray) -> str:
        """Return 16 hex digits of a SHA-256 of all labels and of about 1,000 images."""
        selected_rows = rows[:: max(1, len(rows) // 1000)].tolist()
        return hash_parts(
            rows.tobytes(),
            self.labels[rows].tobytes(),
            *(hashlib.sha256(self._bytes(row)).digest() for row in selected_rows),
        )

    def marks(self) -> list[str]:
        return [rows_fingerprint(self.images)] * len(self.labels)


def _hub(name: str, config: str | None) -> list[Store]:
    """Load the split `train`, and `validation` or else `test`, if there is one."""
    splits = load_hub(name, config, None, None, alternative="train_dir")
    if "train" not in splits:
        raise UsageError(
            f"dataset_name {name!r} has no split train, only {_abbreviate(list(splits))}: give another dataset"
        )
    held_out = [split for split in ("validation", "test") if split in splits][:1]
    return [Rows(splits[split], name, split) for split in ("train", *held_out)]


# ---------------------------------------------------------------------------------------------------------------------
# Images that cannot be decoded


SIXTEEN_BITS, DARK_BITS = "have 16 bits, of which the upper 8 are taken", ""  # the last one is only counted
FRAMES, TURNED = "have several frames: the first is taken", "are turned upright, as their EXIF data say"
CLEAR, COLOURED = "have transparency, which is dropped", "are in colour"
HASH = "hash "  # what is said of an image's content, by which equal ones are found
SIZE = re.compile(r"(\d+) x (\d+)")
"""The size of an image, upright, in pixels, as it is noted: width x height."""


Found = dict[int, tuple[str | None, list[str]]]
"""Row of an image -> why it cannot be decoded (None: it can), and what is to be said of it."""


def _inspect_all(store: Any, num_workers: int | None) -> Found:
    """Find out of each image why it cannot be decoded (None: it can), and what is to be said of it.

    Images that were verified before and have not changed are not read again.

    Raises:
        UsageError: a file that cannot be read at all, which says nothing about its content.
    """
    if not store.is_encoded:
        return {}
    marks, names = store.marks(), [store.name(row) for row in range(len(store.labels))]
    key = hash_parts(store.place, PIL.__version__, "sizes")
    file = Path(datasets.config.HF_DATASETS_CACHE) / "verified_images" / f"{key}.json"
    results = _load_results(file)
    unverified_rows = [row for row, name in enumerate(names) if name not in results or results[name][0] != marks[row]]
    if unverified_rows:
        verify = functools.partial(_verify, store)
        threads = min(num_workers or os.cpu_count() or 1, len(unverified_rows))
        try:
            with ThreadPool(threads) as pool:
                bar = tqdm(
                    pool.imap(verify, unverified_rows, chunksize=CHUNK),
                    total=len(unverified_rows),
                    desc=f"Verifying {store.description}",
                    unit="images",
                )
                for row, (fault, notes) in zip(unverified_rows, bar, strict=True):
                    results[names[row]] = [marks[row], fault, notes]
        finally:  # an interrupted pass goes on where it was
            _save_results(file, {name: results[name] for name in names if name in results})
    return {row: (results[name][1], results[name][2]) for row, name in enumerate(names)}


def _verify(store: Store, row: int) -> tuple[str | None, list[str]]:
    """Say why an image cannot be decoded (None: it can), and what is to be said of it."""
    try:
        image = store.open(row)
        notes = _list_notes(image)
        _decode(image, 3)
        notes.append(f"{HASH}{store.hash_content(row)}")
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise errors of any kind
        if isinstance(error, OSError) and error.errno is not None:
            raise UsageError(
                f"{store.description}: {store.name(row)} cannot be read ({error.strerror}): check the file and its permissions"
            ) from error
        return explain(error), []
    return None, notes


def _list_notes(image: Image.Image) -> list[str]:
    """List what is not taken of an image, or changed."""
    notes = []
    if image.width * image.height <= Image.MAX_IMAGE_PIXELS:  # others are refused
        if getattr(image, "n_frames", 1) > 1:
            notes.append(FRAMES)
            image.seek(0)
        if image.getexif().get(0x0112, 1) != 1:
            notes.append(TURNED)
        if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
            notes.append(CLEAR)
        if _is_coloured(image):
            notes.append(COLOURED)
        notes.append(_write_size(image))
        if image.mode.startswith("I;16"):
            notes.append(SIXTEEN_BITS)
            if np.asarray(image).max() <= DARK:
                notes.append(DARK_BITS)
    return notes


def _is_coloured(image: Image.Image) -> bool:
    """Tell whether an image is in colour, as its mode says; or its palette, which may hold grey levels alone."""
    if image.mode in ("P", "PA"):
        levels = image.getpalette() or []
        return any(len(set(levels[first : first + 3])) > 1 for first in range(0, len(levels), 3))
    return image.mode.startswith(("RGB", "CMYK", "YCbCr", "LAB", "HSV"))


def _write_size(image: Image.Image) -> str:
    """Write the size of an image as it is upright."""
    width, height = image.size[::-1] if image.getexif().get(0x0112, 1) in (5, 6, 7, 8) else image.size
    return f"{width} x {height}"


def _load_results(file: Path) -> dict[str, list]:
    """Load results of verified images: name -> [mark, reason or None, notes]."""
    try:
        results = json.loads(read_text(file, str(file), MAX_RESULTS)).items()
        return {
            name: [str(mark), None if fault is None else str(fault), [*map(str, notes)]]
            for name, (mark, fault, notes) in results
        }
    except (ValueError, TypeError, AttributeError, RecursionError):  # none, or damaged: the images are verified again
        return {}


def _save_results(file: Path, results: dict[str, list]) -> None:
    """Write results whole or not at all. A cache that cannot be written costs the next run a pass."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(results), encoding="utf-8")
        part.replace(file)


def explain(error: Exception) -> str:
    """Describe an error in a few words, without the file's name."""
    return (
        "not an image" if isinstance(error, PIL.UnidentifiedImageError) else " ".join(str(error).split()) or repr(error)
    )


def _describe_bad_rows(store: Store, found: Found) -> str | None:
    """Say how many images cannot be decoded, and which; None: all can."""
    names = [f"{store.name(row)} ({fault})" for row, (fault, _) in found.items() if fault is not None]
    if not names:
        return None
    return f"{store.description}: {len(names)} of {len(store.labels):,} images cannot be decoded: {_abbreviate(names)}"


def _suffix(name: str) -> str:
    return Path(name).suffix.lower() or "without a suffix"


def _abbreviate(names: Sequence[str]) -> str:
    """List the first names, and how many more there are."""
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
