"""Labelled images as samples: a folder per class, a dataset of the hub, or scikit-learn's handwritten digits.

A sample is drawn as (epoch, sample id) and decoded only where it is collated, because every process draws the whole global
batch. How it is cropped, flipped or shifted is drawn from (seed, epoch, sample id), so that its pixels are the same in any
micro-batch, process and worker.

Images that cannot be decoded are found before training: all are decoded once, in parallel, and the outcome is remembered
until a file's size or time changes. So leaving them out gives the same dataset, and the same steps, on every layout.
"""

import contextlib
import functools
import hashlib
import io
import json
import math
import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from transformers import BaseImageProcessor

from samestep._internals.datasets_rows import rows_fingerprint
from samestep.cut.order import sample_rng
from samestep.data.documents import load_hub
from samestep.errors import RunError, UsageError, is_utf8
from samestep.recipe.extras import optional, require
from samestep.recipe.recipe import ImageClassification

datasets, PIL = optional("datasets"), optional("PIL")
Image, ImageOps, tqdm = optional("PIL.Image"), optional("PIL.ImageOps"), optional("datasets.utils.tqdm").tqdm

AUGMENTATION, HELD_OUT = 7, 8  # streams of random numbers (see order.sample_rng)
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
# Whatever a file is called, Pillow looks what it is, and would give EPS, a program in PostScript, to Ghostscript to run.
FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
DIGITS = "builtin/digits"
CENTRE = 224 / 256  # share of the short side that is seen of held-out images, where training crops at random
SCALE, RATIO, ATTEMPTS = (0.08, 1.0), (3 / 4, 4 / 3), 10  # of random crops: share of the area, width / height
NAMED = 10  # names in a message at most
CHUNK = 16  # images that a thread verifies at once


class Drawn(NamedTuple):
    """One sample of one epoch, not decoded yet."""

    epoch: int
    sample_id: int

    @property
    def length(self) -> int:
        """Images all count the same."""
        return 1


class Store(Protocol):
    """Where images come from.

    Attributes:
        what: names it in messages.
        classes: name of each label.
        labels: int64 [images].
    """

    what: str
    classes: list[str]
    labels: np.ndarray

    def open(self, row: int) -> Image.Image:
        """An image, which Pillow may not have decoded yet."""

    def name(self, row: int) -> str:
        """Of an image, for messages."""

    def digest(self, rows: np.ndarray) -> str:
        """16 hex digits (SHA-256) of the content of these rows, wherever they lie."""


class Images:
    """The samples of one part of a dataset.

    Args:
        store: where they come from.
        rows: int64 [samples], the store's row of each sample.
        recipe: its fields of images and its seed.
        training: whether samples are augmented.
        left_out: a line on images that cannot be decoded and are no samples; None: there are none.
    """

    max_length = 1

    def __init__(
        self,
        store: Store,
        rows: np.ndarray,
        recipe: ImageClassification,
        *,
        training: bool,
        left_out: str | None = None,
    ):
        self.store, self.rows, self.left_out, self.classes = store, rows, left_out, store.classes
        self.seed, self.planned = recipe.seed if training else None, recipe.num_train_samples
        self.augmentation = recipe.augmentation
        self.height, self.width, self.num_channels = recipe.image_height, recipe.image_width, recipe.num_channels
        mean, std = np.array(recipe.image_mean), np.array(recipe.image_std)
        # For a whole row of pixels: numpy is slow over so short an axis as the channels.
        self.factor, self.offset = (
            np.tile(each, self.width).astype(np.float32) for each in (1 / (255 * std), -mean / std)
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        """How many images, and what of them is not as the recipe says."""
        lines = [f"{len(self)} images of {len(self.classes)} classes"]
        if len(self) != self.planned:
            lines.append(f"num_train_samples is {self.planned}: epochs are those of {len(self)}")
        return "; ".join(lines + ([f"left out: {self.left_out}"] if self.left_out else []))

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """Of what the samples are made: names, sizes and labels of files, the content of anything else."""
        return {"images": self.store.digest(self.rows)}

    def draw(self, epoch: int, sample_id: int) -> Drawn:
        """Which image; nothing is read."""
        return Drawn(epoch, sample_id)

    def longest(self) -> Drawn:
        """Any image."""
        return Drawn(0, 0)

    def collate(self, samples: list[Drawn]) -> dict[str, torch.Tensor | None]:
        """A micro-batch of S samples; none make one of no rows.

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

        # Pillow lets other threads run while it decodes. A DataLoader's worker has one, and so have digits: not decoded.
        num_threads = 1 if isinstance(self.store, Digits) else torch.get_num_threads()
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(fill, (range(first, len(samples), num_threads) for first in range(num_threads))))
        rows = self.rows[np.array([sample.sample_id for sample in samples], np.int64)]
        return {
            "pixel_values": torch.from_numpy(values.reshape(shape)).permute(0, 3, 1, 2),
            "labels": torch.from_numpy(self.store.labels[rows]),
            "counts": torch.tensor([len(samples)]),
        }

    def pictures(self, pixel_values: torch.Tensor) -> np.ndarray:
        """float [S, height, width, channels] in [0, 1], to look at, of a micro-batch's pixel_values."""
        factor, offset = (each[: self.num_channels] for each in (self.factor, self.offset))
        return np.clip((pixel_values.permute(0, 2, 3, 1).numpy() - offset) / factor / 255, 0, 1)

    def _pixels(self, sample: Drawn) -> np.ndarray:
        """uint8 [height, width, channels]."""
        row = int(self.rows[sample.sample_id])
        try:
            image = _decode(self.store.open(row), self.num_channels)
        except Exception as error:
            raise RunError(
                f"{self.store.what}: {self.store.name(row)} was an image at the start and is none now ({_reason(error)}): "
                "restore it and resume"
            ) from error
        rng = None if self.seed is None else sample_rng(self.seed, AUGMENTATION, *sample)
        crops = self.augmentation == "imagenet"
        if crops and rng is not None:
            box = _random_box(*image.size, rng)
        else:
            box = _centre_box(*image.size, self.width, self.height, CENTRE if crops else 1.0)
        image = image.resize((self.width, self.height), Image.Resampling.BILINEAR, box)
        pixels = np.asarray(image).reshape(self.height, self.width, self.num_channels)
        if rng is None or self.augmentation == "none":
            return pixels
        if crops:
            return pixels[:, ::-1] if rng.random() < 0.5 else pixels
        return _shift(pixels, rng)


def build(
    recipe: ImageClassification, num_workers: int | None = None, on_bad_sample: str = "stop"
) -> tuple[Images, Images | None]:
    """The recipe's training and held-out samples; None when nothing is held out.

    Held out is validation_dir, or the hub dataset's split `validation` or else `test`, or else validation_fraction of the
    images, drawn by the seed. Every process of a run must see the same files.

    Args:
        recipe: its data fields.
        num_workers: threads that decode every image once; None: one per core.
        on_bad_sample: "stop", or "skip": leave out what cannot be decoded, and say so in `left_out`.

    Raises:
        UsageError: data that cannot be used, images that cannot be decoded with "stop" among them.
    """
    require("images", "training on images")
    store, held_out_store = _open(recipe)
    if len(store.classes) == 1:
        raise UsageError(
            f"{store.what} has a single class, {_some(store.classes)}: nothing can be learned; add another"
        )
    if len(store.classes) != recipe.num_labels:
        raise UsageError(
            f"num_labels is {recipe.num_labels}, but {store.what} has {len(store.classes)} classes "
            f"({_some(store.classes)}): set num_labels to {len(store.classes)}"
        )
    stores = [store] if held_out_store is None else [store, held_out_store]
    bad = [_bad_rows(each, num_workers) for each in stores]
    lines = [_line(each, rows) if rows else None for each, rows in zip(stores, bad, strict=True)]
    if any(lines) and on_bad_sample == "stop":
        raise UsageError(f"{'; '.join(filter(None, lines))}: mend or remove them, or set on_bad_sample to skip")
    good = [np.setdiff1d(np.arange(len(each.labels)), list(rows)) for each, rows in zip(stores, bad, strict=True)]
    for each, rows in zip(stores, good, strict=True):
        without = set(each.labels.tolist()) - set(each.labels[rows].tolist())
        if without:
            names = _some([each.classes[label] for label in sorted(without)])
            raise UsageError(f"{each.what}: no image of {names} can be decoded: mend some, or remove the class")
    if held_out_store is not None:
        held_out = Images(held_out_store, good[1], recipe, training=False, left_out=lines[1])
        return Images(store, good[0], recipe, training=True, left_out=lines[0]), held_out
    rows, held_out_rows = _split(good[0], recipe.validation_fraction, recipe.seed)
    held_out = Images(store, held_out_rows, recipe, training=False) if len(held_out_rows) else None
    return Images(store, rows, recipe, training=True, left_out=lines[0]), held_out


def _open(recipe: ImageClassification) -> tuple[Store, Store | None]:
    """All images, and those that are held out if they come apart."""
    if recipe.train_dir is not None:
        store = Files(recipe.train_dir, "train_dir")
        if recipe.validation_dir is None:
            return store, None
        return store, Files(recipe.validation_dir, "validation_dir", store.classes)
    if recipe.dataset_name == DIGITS:
        return Digits(), None
    if recipe.dataset_name.startswith("builtin/"):
        raise UsageError(f"dataset_name {recipe.dataset_name!r} does not exist: the only one built in is {DIGITS}")
    return _hub(recipe.dataset_name, recipe.dataset_config_name)


def _split(rows: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on and rows to hold out, both in their old order; at least one is held out unless the fraction is 0."""
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
    """The image upright, in 1 or 3 channels of 8 bits. Transparency is dropped, as torchvision does.

    Raises:
        ValueError: it has more pixels than Pillow takes for harmless.
    """
    with image:
        if image.width * image.height > Image.MAX_IMAGE_PIXELS:
            raise ValueError(f"{image.width:,} x {image.height:,} pixels, more than {Image.MAX_IMAGE_PIXELS:,}")
        ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I;16"):  # Pillow would cut off what exceeds 255
            return _decode(Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)), num_channels)
        if image.mode == "P" and "transparency" in image.info:
            return image.convert("RGBA").convert("RGB" if num_channels == 3 else "L")  # Pillow warns otherwise
        mode = "RGB" if num_channels == 3 else "L"
        if image.mode != mode:
            return image.convert(mode)
        image.load()  # before the file is closed
        return image


def _random_box(width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a random crop, drawn as torchvision's RandomResizedCrop does.

    8 % to 100 % of the area, width / height from 3/4 to 4/3 with uniform logarithm. If ten draws do not fit: the largest
    crop in the middle within these ratios.
    """
    for _ in range(ATTEMPTS):
        area = width * height * rng.uniform(*SCALE)
        ratio = math.exp(rng.uniform(*map(math.log, RATIO)))
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
    """Left, top, right and bottom of the crop in the middle, of the target's shape, with `share` of the largest one's sides."""
    scale = share * min(width / target_width, height / target_height)
    w, h = target_width * scale, target_height * scale
    left, top = max(0.0, (width - w) / 2), max(0.0, (height - h) / 2)
    return left, top, min(float(width), left + w), min(float(height), top + h)


def _shift(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """uint8 [height, width, channels] moved by up to an eighth of each side; zeros move in."""
    shifted = np.zeros(pixels.shape, np.uint8)
    height, width = pixels.shape[:2]
    down = int(rng.integers(-(height // 8), height // 8 + 1))
    right = int(rng.integers(-(width // 8), width // 8 + 1))
    kept = pixels[max(0, -down) : height - max(0, down), max(0, -right) : width - max(0, right)]
    shifted[max(0, down) :, max(0, right) :][: kept.shape[0], : kept.shape[1]] = kept
    return shifted


def processor(recipe: ImageClassification) -> BaseImageProcessor:
    """What transformers' ResNets take for a preprocessor: it treats images as held-out ones are treated here, if the recipe's
    are squares; else it makes them squares."""
    from transformers.models.convnext.image_processing_pil_convnext import (
        ConvNextImageProcessorPil,
    )  # here: needs Pillow

    return ConvNextImageProcessorPil(
        size={"shortest_edge": recipe.image_height},
        crop_pct=CENTRE if recipe.augmentation == "imagenet" else 1.0,
        resample=Image.Resampling.BILINEAR,
        image_mean=list(recipe.image_mean),
        image_std=list(recipe.image_std),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Stores


class Digits:
    """1,797 handwritten digits of scikit-learn, 8 x 8; grey levels 0 to 16 become 0 to 255."""

    what = DIGITS

    def __init__(self):
        from sklearn.datasets import load_digits  # here: it takes a second, and nothing else needs it

        digits = load_digits()
        self.images = np.round(digits.images * (255 / 16)).astype(np.uint8)
        self.labels = digits.target.astype(np.int64)
        self.classes = [str(name) for name in digits.target_names]

    def open(self, row: int) -> Image.Image:
        return Image.fromarray(self.images[row])

    def name(self, row: int) -> str:
        return f"image {row}"

    def digest(self, rows: np.ndarray) -> str:
        return _hash(self.images[rows].tobytes(), self.labels[rows].tobytes())


class Files:
    """A folder of classes: CLASS/NAME.png, jpg, jpeg, bmp or webp. Classes and names are sorted; hidden ones do not count.

    Args:
        folder: holds the class folders.
        field: the recipe's, for messages.
        classes: of the labels; None: the folders found.

    Raises:
        UsageError: a folder that cannot be read, no class folder, a class folder without images, or one not in `classes`.
    """

    def __init__(self, folder: str, field: str, classes: list[str] | None = None):
        self.folder, self.what = os.path.abspath(os.path.expanduser(folder)), f"{field} {folder}"
        entries = self._list(".")
        found = [entry.name for entry in entries if self._is_folder(entry)]
        if not found:
            loose = sum(entry.name.lower().endswith(SUFFIXES) for entry in entries)
            raise UsageError(
                f"{self.what} has no class folder ({loose} images lie in it directly): put each image into CLASS/NAME"
            )
        self.classes = found if classes is None else classes
        self.names, self.sizes, self.times = [], [], []
        problems, labels = [], []
        if wrong := [name for name in found if not is_utf8(name)]:
            problems.append(f"{self.what} has classes whose names are not UTF-8: {_some(wrong)}: rename them")
        if unknown := sorted(set(found) - set(self.classes)):
            problems.append(f"{self.what} has classes that train_dir lacks: {_some(unknown)}: remove or rename them")
        for name in sorted(set(found) & set(self.classes)):
            inside = self._list(name)
            folders = [entry.name for entry in inside if self._is_folder(entry)]
            images = [entry for entry in inside if entry.name.lower().endswith(SUFFIXES) and entry.name not in folders]
            if folders:
                problems.append(
                    f"{self.what}: class {name} holds folders ({_some(folders)}), but images must be CLASS/NAME: give the "
                    "folder that holds the classes, or move the images up"
                )
            elif not images:
                problems.append(
                    f"{self.what}: class {name} holds no image ({len(inside)} other files): remove it, or add images "
                    f"({', '.join(SUFFIXES)})"
                )
            for entry in images:
                self.names.append(f"{name}/{entry.name}")
                found = self._try(entry.stat, self.names[-1])
                self.sizes.append(found.st_size)
                self.times.append(found.st_mtime_ns)
                if not stat.S_ISREG(found.st_mode):  # reading it could wait for ever
                    problems.append(
                        f"{self.what}: {self.names[-1]} is a device, a pipe or a socket, not a regular file: remove it"
                    )
            labels += [self.classes.index(name)] * len(images)
        if problems:
            raise UsageError(problems)
        self.labels = np.array(labels, np.int64)

    def _is_folder(self, entry: os.DirEntry) -> bool:
        return self._try(entry.is_dir, os.path.relpath(entry.path, self.folder))

    def _list(self, name: str) -> list[os.DirEntry]:
        """The entries of a folder inside, sorted."""
        entries = self._try(lambda: list(os.scandir(os.path.join(self.folder, name))), name)
        return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)

    def _try(self, call: Callable[[], Any], name: str) -> Any:
        try:
            return call()
        except OSError as error:
            where = "it" if name == "." else name
            raise UsageError(
                f"{self.what}: {where} cannot be read ({error.strerror}): check the path and its permissions"
            ) from None

    def open(self, row: int) -> Image.Image:
        return Image.open(os.path.join(self.folder, self.names[row]), formats=FORMATS)

    def name(self, row: int) -> str:
        return self.names[row]

    def digest(self, rows: np.ndarray) -> str:
        lines = (f"{self.names[row]}\0{self.sizes[row]}\0{self.labels[row]}" for row in rows.tolist())
        return _hash("\n".join(lines).encode(errors="surrogateescape"))

    @property
    def place(self) -> str:
        """What verified images are remembered under."""
        return self.folder

    def marks(self) -> list[str]:
        """What changes when an image does, of every row."""
        return [f"{size} {time}" for size, time in zip(self.sizes, self.times, strict=True)]


class Rows:
    """A split of a dataset on the hub: the column that holds images and the one that holds classes.

    Raises:
        UsageError: no such columns, several, or a row without a label.
    """

    def __init__(self, dataset: datasets.Dataset, name: str, split: str):
        self.what = f"dataset_name {name!r}, split {split}"
        image, label = (
            self._column(dataset.features, kind, usual)
            for kind, usual in ((datasets.Image, "image"), (datasets.ClassLabel, "label"))
        )
        self.classes, self.image = dataset.features[label].names, image
        self.labels = dataset.select_columns(label).with_format("numpy")[:][label].astype(np.int64)
        if not len(self.labels) or self.labels.min() < 0 or self.labels.max() >= len(self.classes):
            raise UsageError(f"{self.what}: it is empty, or column {label!r} lacks labels: give a labelled dataset")
        self.images = dataset.select_columns(image).cast_column(image, datasets.Image(decode=False))
        self.place = f"{name} {split}"

    def _column(self, features: datasets.Features, kind: type, usual: str) -> str:
        """The only column of a kind, or the one with the usual name."""
        found = [name for name, feature in features.items() if isinstance(feature, kind)]
        if len(found) != 1 and usual not in found:
            raise UsageError(
                f"{self.what}: {len(found)} columns are {kind.__name__} ({_some(found) or 'none'}), must be one, or one "
                f"of them named {usual!r}"
            )
        return usual if usual in found else found[0]

    def _bytes(self, row: int) -> bytes:
        record = self.images[row][self.image]
        return Path(record["path"]).read_bytes() if record["bytes"] is None else record["bytes"]

    def open(self, row: int) -> Image.Image:
        return Image.open(io.BytesIO(self._bytes(row)), formats=FORMATS)

    def name(self, row: int) -> str:
        return f"row {row}"

    def digest(self, rows: np.ndarray) -> str:
        """Of all labels and of about 1,000 images."""
        some = rows[:: max(1, len(rows) // 1000)].tolist()
        return _hash(
            rows.tobytes(), self.labels[rows].tobytes(), *(hashlib.sha256(self._bytes(row)).digest() for row in some)
        )

    def marks(self) -> list[str]:
        return [rows_fingerprint(self.images)] * len(self.labels)


def _hub(name: str, config: str | None) -> tuple[Rows, Rows | None]:
    """The split `train`, and `validation` or else `test`."""
    splits = load_hub(name, config, None, None, alternative="train_dir")
    if "train" not in splits:
        raise UsageError(f"dataset_name {name!r} has no split train, only {_some(list(splits))}: give another dataset")
    train = Rows(splits["train"], name, "train")
    held_out = next((split for split in ("validation", "test") if split in splits), None)
    return train, None if held_out is None else Rows(splits[held_out], name, held_out)


# ---------------------------------------------------------------------------------------------------------------------
# Images that cannot be decoded


def _bad_rows(store: Store, num_workers: int | None) -> dict[int, str]:
    """Row and reason of each image that cannot be decoded. What was verified before and has not changed is not read again.

    Raises:
        UsageError: a file that cannot be read at all: that says nothing about its content.
    """
    if isinstance(store, Digits):
        return {}
    marks, names = store.marks(), [store.name(row) for row in range(len(store.labels))]
    file = _memory_of(store)
    known = _remembered(file)
    todo = [row for row, name in enumerate(names) if name not in known or known[name][0] != marks[row]]
    if todo:
        verify = functools.partial(_verify, store)
        threads = min(num_workers or os.cpu_count() or 1, len(todo))
        try:
            with ThreadPool(threads) as pool:
                bar = tqdm(pool.imap(verify, todo, chunksize=CHUNK), total=len(todo), desc=f"Verifying {store.what}")
                for row, fault in zip(todo, bar, strict=True):
                    known[names[row]] = [marks[row], fault]
        finally:  # an interrupted pass goes on where it was
            _remember(file, {name: known[name] for name in names if name in known})
    return {row: known[name][1] for row, name in enumerate(names) if known[name][1] is not None}


def _verify(store: Store, row: int) -> str | None:
    """Why an image cannot be decoded; None: it can."""
    try:
        _decode(store.open(row), 3)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise errors of any kind
        if isinstance(error, OSError) and error.errno is not None:
            raise UsageError(
                f"{store.what}: {store.name(row)} cannot be read ({error.strerror}): check the file and its permissions"
            ) from error
        return _reason(error)
    return None


def _memory_of(store: Store) -> Path:
    """The file that remembers what was verified, by this version of Pillow."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "verified_images" / f"{_hash(store.place, PIL.__version__)}.json"


def _remembered(file: Path) -> dict[str, list]:
    """Name -> [mark, reason or None]."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _remember(file: Path, known: dict[str, list]) -> None:
    """Written whole or not at all. A cache that cannot be written costs the next run a pass."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(known), encoding="utf-8")
        part.replace(file)


def _reason(error: Exception) -> str:
    """In a few words, without the file's name."""
    return (
        "not an image" if isinstance(error, PIL.UnidentifiedImageError) else " ".join(str(error).split()) or repr(error)
    )


def _line(store: Store, bad: dict[int, str]) -> str:
    """How many images are bad, and which."""
    named = _some([f"{store.name(row)} ({reason})" for row, reason in bad.items()])
    return f"{store.what}: {len(bad)} of {len(store.labels):,} images cannot be decoded: {named}"


def _some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
