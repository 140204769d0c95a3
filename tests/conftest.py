"""Shared by all tests: an offline cache of their own, a small corpus of real text, and runs of the real script."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# Before torch, datasets and transformers are imported; children inherit it.
_HOME = tempfile.TemporaryDirectory(prefix="recipes-tests-")
os.environ.update(
    HF_HOME=_HOME.name,
    HF_HUB_OFFLINE="1",
    HF_DATASETS_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
    PYTHONWARNINGS="ignore",
)

import pytest
from common import ROOT, TINY, fresh_accelerator, load_script

from recipes.data.documents import load_documents


@pytest.fixture(scope="session")
def script():
    return load_script("pretrain_bert")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """61 real documents of very different lengths, as a .jsonl file."""
    documents = load_documents(train_file=None, dataset_name="builtin/python_docs")
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    texts = [documents[8 * row]["text"][: 200 + 41 * row] for row in range(61)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def train(script, corpus, tmp_path):
    """Train the tiny model in this process: train("name", "--flag value ...") -> output folder."""

    def run(name: str, flags: str = "", *, output_dir: Path | None = None) -> Path:
        fresh_accelerator()
        output_dir = output_dir or tmp_path / name
        script.main([*TINY, "--train_file", str(corpus), "--output_dir", str(output_dir), *flags.split()])
        return output_dir

    return run


@pytest.fixture
def train_on(corpus, tmp_path):
    """Train the tiny model on N real processes over gloo: train_on(2, {"name": "--flag value ..."}) -> folder of all."""

    def run(num_processes: int, runs: dict[str, str]) -> Path:
        argvs = [
            [*TINY, "--train_file", str(corpus), "--output_dir", str(tmp_path / name), *flags.split()]
            for name, flags in runs.items()
        ]
        launch = [
            *(sys.executable, "-m", "accelerate.commands.launch"),
            *("--config_file", str(ROOT / "accelerate_configs" / "2xcpu.yaml")),
            *("--num_processes", str(num_processes), "--main_process_port", "0"),
        ]
        command = [*launch, str(ROOT / "tests" / "run_layouts.py"), json.dumps(argvs)]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=150)
        assert finished.returncode == 0, finished.stderr[-4000:]
        return tmp_path

    return run
