"""Captchas to learn reading from: images that the package `captcha` draws, each decided by a seed and its number.

Captchas are drawn once, in several processes, into one file per split in the cache of `datasets`, from which micro-batches are
read as a memory map. The file begins with the SHA-256 of its content, and is drawn anew when that is not right.

`captcha` takes its random numbers from the module `secrets`, which nobody can seed. `draw_captcha` runs a copy of
captcha.image of our own, in which `secrets` is a `SeededSecrets`. So a seed decides all that the package draws, whichever of
its functions draws it; the module that others import keeps its secrets; and a package that draws from elsewhere is noticed,
because some captchas are drawn twice before the first one is used.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import multiprocessing
import os
import signal
import threading
import time
import types
import uuid
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tqdm import tqdm

from samestep.cut.order import sample_rng
from samestep.data.arrow import hash_modules, hash_parts
from samestep.data.pixels import pixel_values
from samestep.errors import RunError, UsageError
from samestep.recipe.extras import optional, require
from samestep.recipe.tasks.captcha_recognition import CaptchaRecognition

datasets, PIL = optional("datasets"), optional("PIL")

CAPTCHAS = 5  # stream of random numbers (see order.sample_rng)
SPLITS = ("train", "validation")
TESTED_VERSION = "0.7.1"  # version of captcha
# Images that are drawn twice before the first one is used. If the package left just one of an image's random numbers without a
# seed, two images would still be equal with a probability of up to 0.46 (of the number that shows least): all 24 pairs, once in
# 10^8 times.
NUM_CHECKED = 24
PART_SIZE = 32  # images that a process draws before it hands them over
DIGEST_SIZE = 32  # bytes, the first of a file
DAY = 24 * 3600  # seconds


# ---------------------------------------------------------------------------------------------------------------------
# one captcha


class SeededSecrets:
    """The part of the module `secrets` that captcha.image uses, with numbers drawn from a seed.

    Only raw numbers of the bit generator are used: numpy promises that these never change, unlike numbers derived from them.

    Args:
        bits: generator of the numbers, 64 bits each.
    """

    def __init__(self, bits: np.random.BitGenerator):
        self.bits = bits

    def randbits(self, k: int) -> int:
        """Return a number of `k` random bits, 64 at most."""
        return int(self.bits.random_raw()) >> (64 - k)

    def randbelow(self, n: int) -> int:
        """Return a number in [0, n); no number is likelier than another by more than n / 2^64."""
        return int(self.bits.random_raw()) % n

    def choice(self, sequence: Any) -> Any:
        """Return one of the elements."""
        return sequence[self.randbelow(len(sequence))]


def draw_captcha(recipe: CaptchaRecognition, sample_id: int, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Draw the captcha of a number: a pure function of its arguments and the versions of captcha and pillow.

    Args:
        recipe: gives the seed, image size, alphabet and number of characters.
        sample_id: 0 or more.
        split: train or validation.

    Returns:
        The image, uint8 [height, width, 3], red, green and blue; and the place in the alphabet of each of its characters, int64
        [num_characters].

    Raises:
        UsageError: captcha is not installed, or of a version that draws from something that is not seeded.
    """
    secrets = SeededSecrets(sample_rng(recipe.seed, CAPTCHAS, SPLITS.index(split), sample_id).bit_generator)
    label = [secrets.randbelow(len(recipe.alphabet)) for _ in range(recipe.num_characters)]
    text = "".join(recipe.alphabet[place] for place in label)
    return _draw(text, recipe.image_width, recipe.image_height, secrets), np.array(label, np.int64)


def _draw(text: str, width: int, height: int, secrets: SeededSecrets) -> np.ndarray:
    module: Any = _module()
    module.secrets = secrets
    return np.array(_painter(module, width, height).generate_image(text))


@functools.lru_cache
def _painter(module: types.ModuleType, width: int, height: int) -> Any:
    """Return the module's ImageCaptcha, which keeps its fonts."""
    return module.ImageCaptcha(width=width, height=height)


@functools.lru_cache
def _module() -> types.ModuleType:
    """Load a copy of the module captcha.image, and check that it draws from its `secrets` alone."""
    version = _captcha_version()
    try:
        spec = importlib.util.find_spec("captcha.image")
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        painter, images = module.ImageCaptcha(), []
        for seed in [*range(NUM_CHECKED)] * 2:
            module.secrets = SeededSecrets(np.random.Philox(seed))
            images.append(painter.generate_image(f"{seed}aM8").tobytes())
    except Exception as error:
        raise UsageError(_not_seeded(version, f"it fails ({type(error).__name__}: {error})")) from error
    if images[:NUM_CHECKED] != images[NUM_CHECKED:]:
        raise UsageError(_not_seeded(version, "the same numbers give two images"))
    return module


def _captcha_version() -> str:
    require("images", "drawing captchas")
    import captcha

    return captcha.__version__


def _not_seeded(version: str, fault: str) -> str:
    return f"captcha {version} cannot be seeded: {fault} with random numbers of ours. pip install captcha=={TESTED_VERSION}"


# ---------------------------------------------------------------------------------------------------------------------
# the source of samples


@dataclasses.dataclass(frozen=True, slots=True)
class Captcha:
    """The number of an image, as a sample; all samples have length 1."""

    sample_id: int
    length: ClassVar[int] = 1


class Captchas:
    """The captchas of a file, the same in every epoch.

    Args:
        file: as `build` writes it.
        num_samples: number of images in the file.
        shape: height and width in pixels.
        num_characters: characters of an image.
        digest: SHA-256 of the file's content, hexadecimal.
    """

    max_length = 1

    def __init__(self, file: Path, num_samples: int, shape: tuple[int, int], num_characters: int, digest: str):
        self.file, self.num_samples, self.shape, self.num_characters = file, num_samples, shape, num_characters
        self.fingerprints = {"captchas": digest[:16]}

    def __len__(self) -> int:
        return self.num_samples

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the open file: whoever gets a copy, a worker of the DataLoader, opens it anew."""
        return {name: value for name, value in vars(self).items() if name != "rows"}

    @functools.cached_property
    def rows(self) -> np.memmap:
        """Memory map of the file, [images] of `image` uint8 [height, width, 3] and `label` int64 [num_characters]."""
        try:
            row = _row(self.shape, self.num_characters)
            return np.memmap(self.file, row, "r", offset=DIGEST_SIZE, shape=(self.num_samples,))
        except (OSError, ValueError) as error:
            raise RunError(f"captchas {self.file} cannot be read any more ({error}): start again") from error

    def draw(self, epoch: int, sample_id: int) -> Captcha:
        """Return the sample of a number; nothing is read, and all epochs have the same samples."""
        return Captcha(sample_id)

    def longest(self) -> Captcha:
        """Return any sample: they all cost the same."""
        return Captcha(0)

    def collate(self, samples: list[Captcha]) -> dict[str, torch.Tensor]:
        """Make a micro-batch of S samples; no samples make a micro-batch of no rows.

        Returns:
            pixel_values: float32 [S, 3, height, width] in [-1, 1], in memory channels last.
            labels: int64 [S, num_characters].
            counts: int64 [2], S x num_characters and S.
        """
        places = np.array([sample.sample_id for sample in samples], np.int64)
        images, labels = (torch.from_numpy(np.asarray(self.rows[name][places])) for name in ("image", "label"))
        return {
            "pixel_values": pixel_values(images),
            "labels": labels,
            "counts": torch.tensor([len(samples) * self.num_characters, len(samples)]),
        }

    def __str__(self) -> str:
        """Say how many images there are."""
        return f"{len(self):,} images"

    def pictures(self, pixel_values: torch.Tensor) -> np.ndarray:
        """Turn a micro-batch's pixel_values into pictures to look at, float [S, height, width, 3] in [0, 1]."""
        return ((pixel_values + 1) / 2).permute(0, 2, 3, 1).numpy()


def _row(shape: tuple[int, int], num_characters: int) -> np.dtype:
    return np.dtype([("image", np.uint8, (*shape, 3)), ("label", "<i8", (num_characters,))])


# ---------------------------------------------------------------------------------------------------------------------
# the files


def build(recipe: CaptchaRecognition, num_workers: int | None = None) -> tuple[Captchas, Captchas]:
    """Build the recipe's training and held-out captchas; those that are not in the cache, or not whole there, are drawn.

    Args:
        recipe: gives the seed, image size, alphabet, number of characters, and numbers of images.
        num_workers: processes that draw; None: as many as there are processors.

    Raises:
        UsageError: see `draw_captcha`; or the cache cannot be written.
        RunError: a process that draws was killed.
    """
    return _build(recipe, "train", num_workers), _build(recipe, "validation", num_workers)


def _build(recipe: CaptchaRecognition, split: str, num_workers: int | None) -> Captchas:
    num_samples = recipe.num_train_samples if split == "train" else recipe.num_validation_samples
    names = ("seed", "image_height", "image_width", "alphabet", "num_characters")
    decisive = {name: getattr(recipe, name) for name in names}
    decisive |= {"split": split, "num_samples": num_samples, "captcha": _captcha_version(), "pillow": PIL.__version__}
    key = hash_parts(hash_modules(__name__), decisive)
    file = Path(datasets.config.HF_DATASETS_CACHE) / "captchas" / f"{split}-{key}"
    shape = recipe.image_height, recipe.image_width
    digest = _digest(file) or _write(file, recipe, split, num_samples, num_workers)
    return Captchas(file, num_samples, shape, recipe.num_characters, digest)


def _digest(file: Path) -> str | None:
    """Return the SHA-256 of the file's content, hexadecimal; None unless the file exists and begins with this SHA-256."""
    try:
        with open(file, "rb") as stream:
            recorded_digest = stream.read(DIGEST_SIZE)
            digest = hashlib.file_digest(stream, "sha256")
            return digest.hexdigest() if digest.digest() == recorded_digest else None
    except OSError:
        return None


def _write(file: Path, recipe: CaptchaRecognition, split: str, num_samples: int, num_workers: int | None) -> str:
    """Draw a split into the file, which appears when it is whole, and return the SHA-256 of its content, hexadecimal."""
    digest = hashlib.sha256()
    part = file.with_name(f"{file.name}.{uuid.uuid4().hex}.part")  # of our own: another job may be drawing the same
    progress = tqdm(total=num_samples, desc=f"Drawing captchas ({split})", unit="images")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _sweep(file.parent)
        with open(part, "xb") as stream:
            stream.write(bytes(DIGEST_SIZE))
            for rows in _draw_all(recipe, split, num_samples, num_workers or os.cpu_count()):
                stream.write(rows.data)
                digest.update(rows.data)
                progress.update(len(rows))
            stream.seek(0)
            stream.write(digest.digest())
        part.replace(file)
        return digest.hexdigest()
    except OSError as error:
        size = num_samples * _row((recipe.image_height, recipe.image_width), recipe.num_characters).itemsize
        raise UsageError(
            f"captchas cannot be written to {file.parent} ({error.strerror or error}): {size / 1e6:,.1f} MB must fit there, or "
            "set HF_DATASETS_CACHE to another folder"
        ) from error
    finally:
        progress.close()
        with contextlib.suppress(OSError):
            part.unlink()


def _sweep(folder: Path) -> None:
    """Remove the files that killed jobs left unfinished: those to which nobody has written for a day."""
    for part in folder.glob("*.part"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > DAY:
                part.unlink()


def _draw_all(recipe: CaptchaRecognition, split: str, num_samples: int, num_workers: int) -> Iterator[np.ndarray]:
    """Draw all rows of a split in order, PART_SIZE at a time; a few are drawn ahead, not all, so that memory holds them."""
    _module()  # a fault of the package is reported by this process, not by a worker
    parts = [(recipe, split, first, min(first + PART_SIZE, num_samples)) for first in range(0, num_samples, PART_SIZE)]
    num_workers = min(num_workers, len(parts))
    if num_workers == 1:
        yield from (_draw_part(*part) for part in parts)
        return
    pending: collections.deque = collections.deque()
    with ProcessPoolExecutor(num_workers, initializer=_begin_worker) as pool:
        try:
            for part in parts:
                pending.append(pool.submit(_draw_part, *part))
                if len(pending) > 4 * num_workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise RunError(
                "a process that draws captchas was killed, perhaps for its memory: lower --preprocessing_num_workers"
            ) from error


def _draw_part(recipe: CaptchaRecognition, split: str, first: int, last: int) -> np.ndarray:
    """Draw the rows `first` to `last` - 1 of a split, [last - first] of the type `_row`."""
    rows = np.empty(last - first, _row((recipe.image_height, recipe.image_width), recipe.num_characters))
    for row, sample_id in zip(rows, range(first, last), strict=True):
        row["image"], row["label"] = draw_captcha(recipe, sample_id, split)
    return rows


def _begin_worker() -> None:
    """Leave the interrupt key to the parent process, and end when told to, or when the parent process has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
