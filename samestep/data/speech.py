"""Recordings of speech and their texts to samples: log-mel spectrograms, computed when a sample is needed.

Each recording is read once to see whether it can be, and how long it is; its file, or its bytes in the cached table, are read
again for every micro-batch. All are padded to the length that the model's encoder takes, as Whisper is trained.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoFeatureExtractor, WhisperFeatureExtractor

from samestep.data import audio, documents, row_files, row_report, tables
from samestep.data.arrow import Dataset, Features, Value, datasets, hash_parts
from samestep.errors import UsageError, nearest, reason
from samestep.recipe import extras, hub
from samestep.recipe.tasks.seq2seq_finetuning import POSITIONS_PER_SECOND, Seq2SeqFineTuning

FEATURES = (
    Features(
        {
            "path": Value("string"),
            "bytes": Value("binary"),
            "digest": Value("string"),
            "target": Value("string"),
            "origin": Value("string"),
        }
    )
    if datasets
    else None
)
AUDIO = ("audio", "speech", "file", "path", "file_name", "wav")
TEXTS = ("text", "sentence", "transcription", "transcript", "normalized_text", "target")
"""Usual names of the columns of recordings and of their texts."""


def load_rows(
    *, columns: tuple[str | None, str | None] = (None, None), max_seconds: float = 30.0, **source: Any
) -> row_report.Table:
    """Load recordings and texts, as `seq2seq_rows.load_rows` does.

    Args:
        columns: names of the two columns; None: found by their usual names.
        max_seconds: of a recording; a longer one is a row that cannot be used.
        source: as of `documents.load_source`.
    """
    extras.require("speech", "training on speech")
    more: dict[str, Any] = {"columns": columns, "max_seconds": max_seconds, "modules": [audio.__name__]}
    return documents.load_source(_read, FEATURES, "target", adapt=_keep_encoded, **source, **more)


def _keep_encoded(dataset: Dataset) -> Dataset:
    for name, feature in dataset.features.items():
        if isinstance(feature, datasets.Audio):
            dataset = dataset.cast_column(name, datasets.Audio(decode=False))
    return dataset


def _read(
    rows: Iterable[tuple[str, Any]], file: str | None, columns: tuple[str | None, str | None], max_seconds: float
) -> Iterator[dict[str, Any]]:
    origin, folder = (Path(file).stem, str(Path(file).parent)) if file else (None, "")
    notes = row_report.Notes()

    def make(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        text = row_files.check_text(values[names[1]], names[1])
        path, data = audio.find_bytes(values[names[0]], names[0], folder)
        content = audio.read_file(str(path)) if data is None else data
        name = f"{names[0]!r}" if path is None else f"{names[0]!r} {tables.shorten(path)}"
        seconds = len(audio.decode(content, name)) / audio.RATE
        if seconds > max_seconds:
            raise UsageError(
                f"{name} is {seconds:.1f} seconds long, but the model takes {max_seconds:g}: cut it into parts"
            )
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        return {"path": path, "bytes": data, "digest": digest, "target": text, "origin": origin}

    found = functools.partial(find_columns, columns)
    yield from row_report.read_noted(rows, lambda place, present, _: found(place, present), make, notes)
    yield from notes.write(FEATURES, "target")


def find_columns(columns: tuple[str | None, str | None], place: str, present: Sequence[str]) -> tuple[str, str]:
    """Find the columns of recordings and texts. Raises UsageError, with the columns that are present."""
    shown, names = tables.list_names(present), []
    for field, given, usual in zip(("source_column", "target_column"), columns, (AUDIO, TEXTS), strict=True):
        name = given or next((name for name in usual if name in present), None)
        if name is None:
            raise UsageError(
                f"{place}: none of its columns {shown} is called {', '.join(usual)}: name it with --{field}"
            )
        if name not in present:
            hint = nearest(name, map(tables.shorten, present))
            raise UsageError(f"{place} has no column {name!r}, only {shown}. Set {field}: {hint}")
        names.append(name)
    return names[0], names[1]


class Recordings:
    """The sources of samples: spectrograms of recordings.

    Args:
        extractor: makes spectrograms of the numbers of a recording.
        load: returns the numbers of a sample's recording, float32 at `audio.RATE`.
        digest: of all recordings.
        num_positions: of the encoder, for each recording.
        describe: names a sample's recording for people.
        measure: says how long a sample's recording is, and its rate; None: it is drawn at `audio.RATE`.
    """

    def __init__(
        self,
        extractor: WhisperFeatureExtractor,
        load: Callable[[int], np.ndarray],
        digest: str,
        num_positions: int,
        describe: Callable[[int], str],
        measure: Callable[[int], str] | None = None,
    ):
        self.extractor, self.load, self.num_positions = extractor, load, num_positions
        self._digest, self.describe, self._measure = digest, describe, measure
        self.notes: list[str] = []

    def __getitem__(self, sample_id: int) -> int:
        """Return what a sample keeps of its source: its number."""
        return int(sample_id)

    def length(self, source: int) -> int:
        """Count the positions of the encoder."""
        return self.num_positions

    def measure(self, sample_id: int) -> str:
        """Say how long a sample's recording is, and its rate."""
        if self._measure is not None:
            return self._measure(sample_id)
        return f"{len(self.load(sample_id)) / audio.RATE:.2f} seconds at {audio.RATE:,} Hz, drawn"

    def digest(self) -> str:
        """Hash all recordings, and how spectrograms are made of them."""
        return hash_parts(self._digest, self.extractor.to_json_string())

    def num_values(self, num_samples: int) -> int:
        """Count the positions of all sources."""
        return num_samples * self.num_positions

    def longest(self) -> int:
        """Return the source of the greatest length."""
        return 0

    def collate(self, sources: Sequence[int]) -> tuple[torch.Tensor, None]:
        """Compute the spectrograms, float32 [S, bins, frames]; those of no samples are one of zeros."""
        rows = [self._compute(self.load(sample_id)) for sample_id in sources]
        if not rows:
            rows = [np.zeros((self.extractor.feature_size, self.extractor.nb_max_frames), np.float32)]
        return torch.from_numpy(np.stack(rows)), None

    def _compute(self, sound: np.ndarray) -> np.ndarray:
        features = self.extractor(sound, sampling_rate=audio.RATE, return_tensors="np")
        return np.asarray(features["input_features"][0], np.float32)


def read_recordings(rows: Dataset, recipe: Seq2SeqFineTuning) -> Recordings:
    """Make the sources of rows that `load_rows` returned."""
    files = rows.select_columns(["path", "bytes", "digest"])

    def find_content(sample_id: int) -> bytes:
        row = files[sample_id]
        content: bytes = row["bytes"] if row["bytes"] is not None else audio.read_file(row["path"])
        if hashlib.blake2b(content, digest_size=16).hexdigest() != row["digest"]:
            raise UsageError(f"{row['path']} is another file than at the start of the run: begin the run anew")
        return content

    def load(sample_id: int) -> np.ndarray:
        return audio.decode(find_content(sample_id))

    def measure(sample_id: int) -> str:
        return audio.describe(find_content(sample_id))

    def describe(sample_id: int) -> str:
        return str(files[sample_id]["path"] or f"recording {sample_id}")

    digest = hash_parts(*files["digest"])
    return Recordings(make_extractor(recipe), load, digest, recipe.max_source_length, describe, measure)


def make_extractor(recipe: Seq2SeqFineTuning) -> WhisperFeatureExtractor:
    """Load the extractor of the model to start from, or make one of Whisper's for random weights.

    Raises:
        UsageError: there is none, or it is for recordings of another length.
    """
    if recipe.model_name_or_path is None:
        return WhisperFeatureExtractor(chunk_length=recipe.max_source_length // POSITIONS_PER_SECOND)
    name = f"model_name_or_path {recipe.model_name_or_path}"
    hub.announce(recipe.model_name_or_path)
    try:
        extractor = AutoFeatureExtractor.from_pretrained(recipe.model_name_or_path)
    except Exception as error:  # of any kind: network, names, files of others
        way_out = hub.describe_way_out(recipe.model_name_or_path)
        raise UsageError(f"{name} has no preprocessor_config.json that can be read: {reason(error)}{way_out}") from None
    length = getattr(extractor, "chunk_length", 0) * POSITIONS_PER_SECOND
    if length != recipe.max_source_length:
        raise UsageError(
            f"max_source_length is {recipe.max_source_length}, but {name} takes {length}: set it to {length}"
        )
    return extractor
