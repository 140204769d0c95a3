"""What libraries print during short and long work, before and after they are quieted; a fork server imports this."""

import os
import sys
import time
from pathlib import Path

import datasets
import huggingface_hub.utils.logging
from transformers import BertConfig, BertForMaskedLM, BertModel

from samestep._internals import library_output


def _slow(row: dict) -> dict:
    time.sleep(0.1)
    return row


def _work(folder: Path, name: str) -> None:
    rows = datasets.Dataset.from_dict({"a": [1, 2, 3, 4]})
    rows.map(lambda row: row, desc="SHORT", new_fingerprint=f"{name}short")
    library_output.SECONDS, seconds = 0.05, library_output.SECONDS
    rows.map(_slow, desc="LONG", new_fingerprint=f"{name}long")
    library_output.SECONDS = seconds
    config = BertConfig(vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    BertModel(config).save_pretrained(folder / "model")
    BertForMaskedLM.from_pretrained(folder / "model")
    huggingface_hub.utils.logging.get_logger("huggingface_hub.x").warning("Retrying in 1s")
    sys.stderr.flush()


def main(folder: str) -> None:
    """Write what is printed into `folder`/loud and `folder`/quiet."""
    sys.modules["datasets.utils.tqdm"]._hf_datasets_progress_bars_disabled = False  # tests have no bars
    for name in ("loud", "quiet"):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT, 0o644), 2)
        if name == "quiet":
            library_output.quiet_libraries()
        _work(Path(folder), name)
    os._exit(0)
