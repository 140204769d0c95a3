"""Reads recordings: bytes of wav, flac and what else libsndfile knows, as one channel at the rate that a model takes."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from samestep.data.tables import shorten
from samestep.errors import UsageError, reason
from samestep.recipe.extras import optional
from samestep.recipe.reading import find_fault, format_name, open_without_waiting

soundfile, soxr = optional("soundfile"), optional("soxr")
RATE = 16000
"""Numbers per second that models of speech take."""
RATES = (1000, 384_000)
"""Least and greatest rates of recordings."""
MAX_BYTES = 2**30


def find_bytes(value: Any, name: str, folder: str) -> tuple[str | None, bytes | None]:
    """Find what a cell of audio holds: the path of a file, or its bytes.

    Args:
        value: a path, bytes, or a mapping with `bytes` or `path`, as `datasets` has it.
        name: of the column, for messages.
        folder: in which a path that is not absolute lies.

    Raises:
        UsageError: it is none of these.
    """
    if isinstance(value, Mapping):
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes):
        return None, value
    if isinstance(value, str) and "://" in value:
        raise UsageError(f"{name!r} is the address {shorten(value)!r}: load the file, and give its path")
    if isinstance(value, str) and value:
        return str(Path(folder, value)), None
    if value is None or value == "":
        raise UsageError(f"{name!r} is empty: give a file, or remove the row")
    raise UsageError(f"{name!r} holds {type(value).__name__}, not a path or bytes of audio")


def read_file(path: str) -> bytes:
    """Read a file of audio whole. Raises UsageError where it cannot be read."""
    if fault := find_fault(path):
        raise UsageError(f"{format_name(path)} {fault}")
    try:
        with open_without_waiting(path) as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{format_name(path)} cannot be read: {error.strerror}. Check the path") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"{format_name(path)} has more than {MAX_BYTES:,} bytes: cut it into parts")
    return data


def decode(data: bytes, name: str = "audio") -> np.ndarray:
    """Decode a recording: float32 [numbers], the mean of its channels at `RATE`.

    Args:
        data: of a file.
        name: of the recording, for messages.

    Raises:
        UsageError: it is no audio, is cut off, has no sound, or numbers that are not finite.
    """
    if not data:
        raise UsageError(f"{name} has no bytes: write it anew, or remove the row")
    if problem := _find_cut(data):
        raise UsageError(f"{name} is cut off: {problem}. Load it anew, or remove the row")
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except Exception as error:  # of any kind: the file was written by others
        raise UsageError(f"{name} is no audio that can be read ({reason(error)}): write it as wav or flac") from None
    try:
        with file:
            rate, num_frames = file.samplerate, file.frames
            sound = file.read(dtype="float32", always_2d=True)
    except Exception as error:  # of any kind, too
        raise UsageError(f"{name} is cut off or damaged ({reason(error)}): load it anew, or remove the row") from None
    if len(sound) < num_frames:
        raise UsageError(f"{name} is cut off: {len(sound):,} of {num_frames:,} frames can be read. Load it anew")
    if not len(sound):
        raise UsageError(f"{name} holds no sound: remove the row")
    if not RATES[0] <= rate <= RATES[1]:
        raise UsageError(f"{name} has {rate:,} frames a second, must have {RATES[0]:,} to {RATES[1]:,}: write it anew")
    if not np.isfinite(sound).all():
        raise UsageError(f"{name} holds numbers that are not finite: write it anew, or remove the row")
    mono = sound.mean(1)
    return mono if rate == RATE else soxr.resample(mono, rate, RATE).astype(np.float32)


def describe(data: bytes) -> str:
    """Describe a recording as it was written: its seconds, rate and channels."""
    found = soundfile.info(io.BytesIO(data))
    channels = f", {found.channels} channels" if found.channels > 1 else ""
    return f"{found.duration:.2f} seconds at {found.samplerate:,} Hz{channels}"


def _find_cut(data: bytes) -> str | None:
    """Say that a wav file has fewer bytes than its header promises; libsndfile reads what is there."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE" or len(data) < 12:
        return None
    promised = int.from_bytes(data[4:8], "little") + 8
    is_stream = promised in (8, 2**32 + 7)  # whoever wrote it did not know the length
    return f"{len(data):,} of {promised:,} bytes" if promised > len(data) + 1 and not is_stream else None
