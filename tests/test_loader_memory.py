"""The memory of a loader does not depend on how many rows its dataset has."""

import json

import pytest
from run_loader_memory import COLUMNS, write

FEW, MANY = 20_000, 100_000


@pytest.fixture(scope="module")
def grown(trainings, tmp_path_factory) -> dict[str, float]:
    """Measure kind of samples -> bytes that a loader needs more for one more row."""
    folder = tmp_path_factory.mktemp("rows")
    memory = {}
    for kind in COLUMNS:
        for rows in (FEW, MANY):
            words = [str(folder), kind, str(write(kind, folder / f"{kind}{rows}", rows))]
            trainings.run(words, 1, module="run_loader_memory")
            measured = json.loads((folder / "memory.json").read_text())
            memory[kind, rows] = measured["samples"] + measured["steps"]
    return {kind: (memory[kind, MANY] - memory[kind, FEW]) / (MANY - FEW) for kind in COLUMNS}


@pytest.mark.parametrize("kind", ["token_blocks", "sentence_pairs"])
def test_pretraining_keeps_nothing_per_row(kind, grown):
    """Not one number of 8 bytes; what grows is about 1.2 kB for each 1,000 rows of a column of lists."""
    assert grown[kind] < 6


def test_a_classifier_keeps_two_numbers_per_row(grown):
    """Label and length of the first text, 16 bytes. All labels are strings in memory for a moment before."""
    assert grown["labelled_texts"] < 24
