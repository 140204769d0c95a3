"""The memory of a loader, in a process of its own: bytes that opening the file of its rows, making its samples and taking 100
steps left allocated. The file, mapped into memory, does not count."""

import gc
import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset
from transformers import BertTokenizerFast, GPT2TokenizerFast

from samestep.cut.layout import solve_layout
from samestep.cut.order import Order
from samestep.data.labelled_texts import LabelledTexts
from samestep.data.sentence_pairs import SentencePairs
from samestep.data.steps import Steps
from samestep.data.token_blocks import PackedBlocks
from samestep.recipe.catalog import load

CHUNK = 1000  # rows of a chunk: what `datasets` writes
TOKENS, SENTENCE = 12, 4  # of a row, and of its sentences
COLUMNS = {
    "token_blocks": ("tokens",),
    "sentence_pairs": ("tokens", "ends", "cuts"),
    "labelled_texts": ("tokens", "first", "is_cut", "label"),
}


def write(kind: str, file: Path, num_rows: int) -> Path:
    """Write a file as samples of a kind are cached in."""
    tokens = np.random.default_rng(0).integers(10, 200, size=CHUNK * TOKENS, dtype=np.int32)
    ends = np.tile(np.arange(SENTENCE, TOKENS + 1, SENTENCE, dtype=np.int32), CHUNK)
    cuts = np.tile(np.array([0, TOKENS // SENTENCE], np.int32), CHUNK)
    lists = [
        pa.ListArray.from_arrays(np.arange(CHUNK + 1, dtype=np.int32) * (len(values) // CHUNK), pa.array(values))
        for values in (tokens, ends, cuts)
    ]
    columns = {
        **dict(zip(("tokens", "ends", "cuts"), lists, strict=True)),
        "label": pa.array(["ab"[row % 2] for row in range(CHUNK)]),
        "first": pa.array(np.full(CHUNK, TOKENS, np.int32)),
        "is_cut": pa.array([False] * CHUNK),
    }
    batch = pa.record_batch({name: columns[name] for name in COLUMNS[kind]})
    with pa.OSFile(str(file), "wb") as stream, pa.ipc.new_stream(stream, batch.schema) as writer:
        for _ in range(num_rows // CHUNK):
            writer.write_batch(batch)
    return file


def tokenized(file: Path) -> Dataset:
    """Open the dataset of a file of `write`, which needs no tokenizing any more."""
    dataset = Dataset.from_file(str(file))
    dataset.map = lambda *_, **__: dataset
    return dataset


def allocated() -> int:
    """Count the bytes that Python, numpy and Arrow hold: the same on every machine, as resident ones are not."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes()


def samples(kind: str, dataset: Dataset):
    """Make the source of samples of a kind."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(200))]
    wordpiece = BertTokenizerFast(vocab={word: place for place, word in enumerate(words)})
    if kind == "token_blocks":
        return PackedBlocks(dataset, GPT2TokenizerFast(vocab={"<|endoftext|>": 0}, merges=[]), block_size=128, seed=0)
    if kind == "labelled_texts":
        return LabelledTexts(dataset, wordpiece, max_seq_length=128, classes=["a", "b"])
    return SentencePairs(dataset, wordpiece, load("bert_base", {"seed": 0}))


def measure(kind: str, file: Path) -> dict[str, int]:
    layout = solve_layout(num_processes=1, global_batch_size=64, per_device_train_batch_size=64)
    tracemalloc.start()
    memory = [allocated()]
    dataset = tokenized(file)
    memory.append(allocated())
    source = samples(kind, dataset)
    steps = Steps(source, Order(len(source), 64, seed=0), layout, process_index=0)
    memory.append(allocated())
    for step in range(100):
        steps[step]
    memory.append(allocated())
    return dict(zip(("file", "samples", "steps"), np.diff(memory).tolist(), strict=True))


def main(folder: str, kind: str, file: str) -> None:
    """Leave in memory.json what `measure` counts of a file of a kind, and end the process."""
    (Path(folder) / "memory.json").write_text(json.dumps(measure(kind, Path(file))))
    os._exit(0)
