"""The memory of a loader does not depend on how many rows its dataset has."""

import json
import os
import subprocess
import sys

import pytest
from common import ROOT
from run_loader_memory import COLUMNS, write

FEW, MANY = 100_000, 500_000


@pytest.fixture(scope="module")
def grown(tmp_path_factory) -> dict[str, float]:
    """Measure kind of samples -> bytes that a loader needs more for one more row."""
    folder = tmp_path_factory.mktemp("rows")
    words = [
        word for kind in COLUMNS for rows in (FEW, MANY) for word in (kind, write(kind, folder / f"{kind}{rows}", rows))
    ]
    command = [sys.executable, ROOT / "tests" / "helpers" / "run_loader_memory.py", *words]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    finished = subprocess.run(command, capture_output=True, text=True, env=env)
    assert finished.returncode == 0, finished.stderr[-3000:]
    memory = [line["samples"] + line["steps"] for line in map(json.loads, finished.stdout.splitlines())]
    return {kind: (memory[2 * n + 1] - memory[2 * n]) / (MANY - FEW) for n, kind in enumerate(COLUMNS)}


@pytest.mark.parametrize("kind", ["token_blocks", "sentence_pairs"])
def test_pretraining_keeps_nothing_per_row(kind, grown):
    """Not one number of 8 bytes; what grows is about 1.2 kB for each 1,000 rows of a column of lists."""
    assert grown[kind] < 6


def test_a_classifier_keeps_two_numbers_per_row(grown):
    """Label and length of the first text, 16 bytes. All labels are strings in memory for a moment before."""
    assert grown["labelled_texts"] < 24
