"""Digits that are spoken by a drawn voice: a buzz through two resonances that move, as of vowels, and noise for consonants.

A recording is a pure function of a seed and a number. Sequences of digits belong to one split, which a hash of them decides, so
that no held-out sequence occurs in training; the voices are others in every recording.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from samestep.cut.order import sample_rng
from samestep.data import documents
from samestep.data.arrow import Dataset, Features, Value, datasets, hash_modules, hash_parts
from samestep.data.audio import RATE
from samestep.recipe.extras import optional

signal = optional("scipy.signal")

SPOKEN = 32  # stream of random numbers (see order.sample_rng)
SPLITS = ("train", "validation")
HELD_OUT = 10  # one sequence of so many is held out
MAX_DIGITS = 4
FEATURES = Features(dict.fromkeys(("target", "origin"), Value("string"))) if datasets else None
NAMES = "zero one two three four five six seven eight nine".split()


class Sound(NamedTuple):
    """Sound of a digit.

    Attributes:
        hiss: share of the digit that is noise at its beginning, its place in Hz; 0: none.
        hiss_hz: middle of that noise.
        start, end: first two resonances, in Hz, at the vowel's beginning and end.
    """

    hiss: float
    hiss_hz: float
    start: tuple[float, float]
    end: tuple[float, float]


SOUNDS = (
    Sound(0.15, 5000, (280, 2200), (500, 900)),
    Sound(0.0, 0, (350, 700), (650, 1200)),
    Sound(0.1, 3500, (350, 1500), (320, 900)),
    Sound(0.15, 2500, (400, 1300), (280, 2300)),
    Sound(0.12, 1500, (500, 800), (480, 1100)),
    Sound(0.12, 1500, (750, 1200), (300, 2200)),
    Sound(0.3, 5500, (400, 2000), (400, 1900)),
    Sound(0.2, 5500, (550, 1800), (500, 1500)),
    Sound(0.0, 0, (450, 2000), (280, 2400)),
    Sound(0.0, 0, (320, 1600), (320, 1650)),
)
"""Rough values of English, which a listener need not understand: they differ."""


def draw_digits(seed: int, split: str, sample_id: int) -> tuple[int, ...]:
    """Draw the digits of a recording."""
    rng = sample_rng(seed, SPOKEN, SPLITS.index(split), sample_id)
    while True:
        digits = tuple(int(digit) for digit in rng.integers(10, size=int(rng.integers(1, MAX_DIGITS + 1))))
        if find_split(digits) == split:
            return digits


def find_split(digits: tuple[int, ...]) -> str:
    """Find the split that a sequence belongs to, by a hash of it; single digits are in training."""
    digest = hashlib.sha256(bytes(digits)).digest()
    is_held_out = len(digits) > 1 and int.from_bytes(digest[:8], "big") % HELD_OUT == 0
    return "validation" if is_held_out else "train"


def write(digits: tuple[int, ...]) -> str:
    """Write the digits as words.

    >>> write((4, 0))
    'four zero'
    """
    return " ".join(NAMES[digit] for digit in digits)


def draw_sound(seed: int, split: str, sample_id: int) -> np.ndarray:
    """Draw a recording: float32 [numbers], at 16 kHz, less than 2 seconds."""
    digits = draw_digits(seed, split, sample_id)
    rng = sample_rng(seed, SPOKEN, 2 + SPLITS.index(split), sample_id)
    pitch, size = rng.uniform(90, 240), rng.uniform(0.9, 1.15)  # of the voice, and of the throat
    parts = [np.zeros(int(RATE * rng.uniform(0.02, 0.08)))]
    for digit in digits:
        parts.append(_speak(SOUNDS[digit], pitch * rng.uniform(0.9, 1.1), size, rng.uniform(0.22, 0.36), rng))
        parts.append(np.zeros(int(RATE * rng.uniform(0.02, 0.08))))
    sound = np.concatenate(parts)
    sound += rng.normal(size=len(sound)) * np.abs(sound).max() * rng.uniform(0.003, 0.03)
    return (sound / np.abs(sound).max() * rng.uniform(0.3, 0.9)).astype(np.float32)


def _speak(sound: Sound, pitch: float, size: float, seconds: float, rng: np.random.Generator) -> np.ndarray:
    """Make a digit's numbers: noise, then a buzz whose resonances move, in pieces of 20 ms."""
    length, hiss = int(RATE * seconds), int(RATE * seconds * sound.hiss)
    phase = np.cumsum(pitch * (1 - 0.1 * np.arange(length - hiss) / length) / RATE)
    buzz = np.diff(np.floor(phase), prepend=0.0) + 0.01 * rng.normal(size=length - hiss)
    places = np.linspace(0, 1, max(1, -(-len(buzz) // 320)))
    pieces, states = [], [np.zeros(2), np.zeros(2)]
    for place, piece in zip(places, np.array_split(buzz, len(places)), strict=True):
        for number in range(2):
            hz = size * ((1 - place) * sound.start[number] + place * sound.end[number])
            piece, states[number] = _resonate(piece, hz, 60 + 40 * number, states[number])
        pieces.append(piece)
    vowel = np.concatenate(pieces)
    vowel *= np.sin(np.pi * np.linspace(0.02, 0.98, len(vowel))) ** 0.5 / np.abs(vowel).max()
    if not hiss:
        return vowel
    noise, _ = _resonate(rng.normal(size=hiss), min(sound.hiss_hz * size, 7500), 800, np.zeros(2))
    return np.concatenate([0.3 * noise / np.abs(noise).max(), vowel])


def _resonate(x: np.ndarray, hz: float, width: float, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Filter numbers by a resonance of a frequency and a width, both in Hz; return them and the filter's state."""
    radius, angle = np.exp(-np.pi * width / RATE), 2 * np.pi * hz / RATE
    return signal.lfilter([1 - radius], [1, -2 * radius * np.cos(angle), radius**2], x, zi=state)


def load(seed: int, split: str, num_samples: int) -> tuple[Dataset, Callable[[int], np.ndarray], str]:
    """Draw a split: rows with columns `target` and `origin`, cached; what draws the recording of a row; a hash of all."""
    key = (seed, split, num_samples, hash_modules(__name__))
    rows = documents.cache_rows(_draw_rows, FEATURES, key=key, seed=seed, split=split, num_samples=num_samples)
    return rows, functools.partial(draw_sound, seed, split), hash_parts(*key)


def _draw_rows(seed: int, split: str, num_samples: int) -> Iterator[dict[str, Any]]:
    for sample_id in range(num_samples):
        yield {"target": write(draw_digits(seed, split, sample_id)), "origin": None}
