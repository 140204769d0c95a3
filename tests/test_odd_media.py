"""Odd images and recordings in rows: each is used, or said in one line with its place; no other row is lost for it."""

import base64
import io
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from image_bases import save_image_base
from PIL import Image

from samestep.data import audio, conversations, seq2seq
from samestep.errors import UsageError
from samestep.recipe.catalog import load
from samestep.recipe.tasks.causal_lm_finetuning import DRAWN_SIZES, CausalLmFineTuning

NONE = ("architecture", "vocab_size", *CausalLmFineTuning.SHAPE, "dataset_name", "dataset_config_name", *DRAWN_SIZES)
IMAGE = Image.new("RGB", (20, 30), (10, 20, 30))
TURNED = Image.Exif()
TURNED[0x0112] = 6


def save(image: Image.Image, kind: str, **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def sound(hz: float = 440, rate: int = audio.RATE, seconds: float = 0.5) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hz * np.arange(int(rate * seconds)) / rate)


def encode(values: np.ndarray, rate: int = audio.RATE, kind: str = "WAV", subtype: str | None = "PCM_16") -> bytes:
    content = io.BytesIO()
    soundfile.write(content, values, rate, format=kind, subtype=subtype)
    return content.getvalue()


PNG = save(IMAGE, "PNG")
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
JPEG = save(NOISE, "JPEG")
FRAMES = {"save_all": True, "append_images": [Image.new("RGB", IMAGE.size)]}
URI = "data:image/png;base64,"
MISSING, FOLDER = "cannot be read: No such file", "is a folder, not a regular file"
BROKEN = "cannot be decoded"

# Name of a file -> its bytes, and what is said of it (None: it is used); without bytes there is no file of that name.
IMAGES: dict[str, tuple[bytes | None, str | None]] = {
    "cmyk.jpg": (save(IMAGE.convert("CMYK"), "JPEG"), None),
    "grey.png": (save(IMAGE.convert("L"), "PNG"), None),
    "grey with alpha.png": (save(IMAGE.convert("LA"), "PNG"), None),
    "alpha.png": (save(IMAGE.convert("RGBA"), "PNG"), None),
    "palette.gif": (save(IMAGE.convert("P"), "GIF"), None),
    "palette with alpha.png": (save(IMAGE.convert("P"), "PNG", transparency=0), None),
    "animated.gif": (save(IMAGE, "GIF", **FRAMES), None),
    "animated.png": (save(IMAGE, "PNG", **FRAMES), None),
    "animated.webp": (save(IMAGE, "WEBP", **FRAMES), None),
    "16 bits.png": (save(Image.fromarray(np.full((30, 20), 40000, np.uint16)), "PNG"), None),
    "1 bit.png": (save(IMAGE.convert("1"), "PNG"), None),
    "a point.png": (save(Image.new("RGB", (1, 1)), "PNG"), None),
    "a line.png": (save(Image.new("RGB", (3000, 1)), "PNG"), None),
    "turned.jpg": (save(IMAGE, "JPEG", exif=TURNED), None),
    "numbers.tif": (save(Image.fromarray(np.full((30, 20), 0.5, np.float32)), "TIFF"), None),
    "a png.jpg": (PNG, None),
    "a png.txt": (PNG, None),
    "without a suffix": (PNG, None),
    "zero bytes.png": (b"", "not an image"),
    "text.png": (b"no image", "not an image"),
    "zeros.png": (bytes(4000), "not an image"),
    "drawing.svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
    "page.pdf": (b"%PDF-1.7\n", "not an image"),
    "cut.png": (PNG[:60], BROKEN),
    "cut.jpg": (JPEG[: len(JPEG) // 2], BROKEN),
    "its header.jpg": (JPEG[:20], "not an image"),
    "damaged.png": (PNG[:45] + bytes(8) + PNG[53:], BROKEN),
    "too bright.tif": (save(Image.fromarray(np.full((30, 20), 7.5, np.float32)), "TIFF"), "floating numbers from 7.5"),
    "bomb.png": (save(Image.new("1", (20000, 20000)), "PNG"), "decompression bomb"),
    "gone.png": (None, MISSING),
    ".": (None, FOLDER),
    "pipe.png": (None, "is a device, a pipe or a socket"),
    "https://a.b/c.png": (None, "is at https://a.b/c.png, but a training downloads none"),
    "a\0b.png": (None, "has a name that no file can have"),
}
CELLS_OF_IMAGES: dict[str, tuple[Any, str | None]] = {
    "uri": (URI + base64.b64encode(PNG).decode(), None),
    "uri of nothing": (URI, "not an image"),
    "uri that is none": ("data:image/png,abc", "data: URI without base64"),
    "uri of other letters": (URI + "%%%", "is no base64"),
    "null": ({"bytes": None, "path": None}, "neither path nor bytes"),
    "number": (3, "an image is int, must be a path or bytes"),
    "empty": ("", None),  # as a table has it for a question about no image
}

WAV = encode(sound())
FLAC = encode(np.random.default_rng(0).normal(size=8000) * 0.1, kind="FLAC")
NOT_FINITE = "holds numbers that are not finite"
SOUNDS: dict[str, tuple[bytes | None, str | None]] = {
    "3 channels.wav": (encode(np.stack([sound()] * 3, 1)), None),
    "8 bits.wav": (encode(sound(), subtype="PCM_U8"), None),
    "24 bits.wav": (encode(sound(), subtype="PCM_24"), None),
    "numbers.wav": (encode(sound(), subtype="FLOAT"), None),
    "telephone.wav": (encode(sound(440, 8000), 8000, subtype="ULAW"), None),
    "extended.wav": (encode(sound(), kind="WAVEX"), None),
    "44 kHz.flac": (encode(sound(440, 44100), 44100, "FLAC"), None),
    "big endian.aiff": (encode(sound(), kind="AIFF"), None),
    "vorbis.ogg": (encode(sound(), kind="OGG", subtype="VORBIS"), None),
    "a wav.txt": (WAV, None),
    "one frame.wav": (encode(np.zeros(1)), None),
    "zero bytes.wav": (b"", "has no bytes"),
    "text.wav": (b"not a recording at all" * 9, "is no audio that can be read"),
    "zeros.wav": (bytes(5000), "is no audio that can be read"),
    "an image.wav": (PNG, "is no audio that can be read"),
    "cut.wav": (WAV[: len(WAV) // 2], "is cut off"),
    "its header.wav": (WAV[:44], "is cut off"),
    "half a header.wav": (WAV[:20], "is cut off"),
    "cut.flac": (FLAC[: len(FLAC) // 2], "is cut off"),
    "its header.flac": (FLAC[:50], "is "),
    "damaged.flac": (FLAC[:2000] + bytes(3000) + FLAC[5000:], "is cut off or damaged"),
    "no sound.wav": (encode(np.zeros(0)), "holds no sound"),
    "nan.wav": (encode(np.array([0.0, np.nan, 1.0] * 100), subtype="FLOAT"), NOT_FINITE),
    "nan in 64 bits.wav": (encode(np.array([0.0, np.nan, 1.0] * 100), subtype="DOUBLE"), NOT_FINITE),
    "infinite.wav": (encode(np.array([0.0, np.inf, 1.0] * 100), subtype="FLOAT"), NOT_FINITE),
    "no rate.wav": (WAV[:24] + struct.pack("<I", 0) + WAV[28:], "is no audio that can be read"),
    "slow.wav": (encode(sound(10, 100, 2.0), 100), "has 100 frames a second, must have 1,000 to 384,000"),
    "fast.wav": (encode(sound(), 2_000_000), "has 2,000,000 frames a second"),
    "long.wav": (encode(np.zeros(17000)), "is 1.1 seconds long, but the model takes 1: cut it into parts"),
    "gone.wav": (None, MISSING),
    ".": (None, FOLDER),
    "pipe.wav": (None, "is a device, a pipe or a socket"),
    "https://a.b/c.wav": (None, "is the address 'https://a.b/c.wav': load the file"),
}
CELLS_OF_SOUNDS: dict[str, tuple[Any, str | None]] = {
    "null": (None, "is empty: give a file, or remove the row"),
    "number": (3, "holds int, not a path or bytes of audio"),
    "empty mapping": ({"path": None, "bytes": None}, "is empty"),
}


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return save_image_base(tmp_path_factory.mktemp("bases") / "llava", "llava")


@pytest.fixture
def build_images(llava):
    def build(file: Path, on_bad_row: str) -> Any:
        changes = dict.fromkeys(NONE) | {"model_name_or_path": str(llava), "train_file": [str(file)]}
        changes |= {"images": True, "validation_fraction": 0.0, "max_seq_length": 512}
        return conversations.build(load("sft_small_cpu", changes), None, on_bad_row)[0]

    return build


def build_sounds(file: Path, on_bad_row: str) -> Any:
    changes = {"train_file": [str(file)], "validation_fraction": 0, "max_source_length": 50}
    return seq2seq.build(load("speech_small_cpu", changes), on_bad_row=on_bad_row)[0]


def check(
    folder: Path,
    files: dict[str, tuple[bytes | None, str | None]],
    cells: dict[str, tuple[Any, str | None]],
    make_row: Callable[[Any], dict],
    build: Callable[[Path, str], Any],
) -> None:
    """Check that rows are used, or listed in a line each, in their order; and that all bad ones are refused together."""
    for name, (content, _) in files.items():
        if content is not None:
            (folder / name).write_bytes(content)
        elif name.startswith("pipe"):
            os.mkfifo(folder / name)
    table = [(name, message) for name, (_, message) in files.items()] + [*cells.values()]
    assert len(table) > 35
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(make_row(cell)) + "\n" for cell, _ in table), encoding="utf-8")
    source = build(file, "skip")
    bad = sorted(source.row_reports[0].bad, key=lambda problem: int(problem.place.rpartition(":")[2]))
    expected = [(f"{file}:{number}", message) for number, (_, message) in enumerate(table, 1) if message is not None]
    assert [problem.place for problem in bad] == [place for place, _ in expected]
    for problem, (_, message) in zip(bad, expected, strict=True):
        assert message in problem.reason, problem
        assert "\n" not in problem.reason
        assert len(problem.reason) < 400
    num_used = len(table) - len(expected)
    assert len(source) == num_used
    source.collate([source.draw(0, sample_id) for sample_id in range(num_used)])
    with pytest.raises(UsageError, match=f"leaves out these {len(expected)} rows of {len(table)}"):
        build(file, "refuse")


def test_odd_images(tmp_path, build_images):
    check(tmp_path, IMAGES, CELLS_OF_IMAGES, lambda cell: {"image": cell, "question": "?", "answer": "a"}, build_images)


def test_odd_recordings(tmp_path):
    check(tmp_path, SOUNDS, CELLS_OF_SOUNDS, lambda cell: {"audio": cell, "text": "three"}, build_sounds)


def test_texts_of_recordings_that_are_none(tmp_path):
    (tmp_path / "good.wav").write_bytes(WAV)
    rows = [{"audio": "good.wav", "text": text} for text in ("one", None, "", " ", 3)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = build_sounds(file, "skip")
    assert len(source) == 1
    reasons = [problem.reason for problem in source.row_reports[0].bad]
    assert ["'text' is empty" in reason for reason in reasons] == [True, True, True, False]
    assert "'text' holds int" in reasons[3]
