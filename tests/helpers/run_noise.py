"""What libraries print during short and long work, before and after they are quieted; a fork server imports this."""

import itertools
import os
import sys
from pathlib import Path

import datasets
import huggingface_hub.utils.logging
import tqdm.std
from transformers import BertConfig, BertForMaskedLM, BertModel

from samestep._internals import library_output


def _work(folder: Path, name: str) -> None:
    rows = datasets.Dataset.from_dict({"a": [1, 2, 3, 4]})
    for kind, seconds in (("SHORT", 0.0), ("LONG", 2.0 * library_output.SECONDS)):
        moments = itertools.count(step=seconds)  # of the clock by which tqdm shows bars: so many from look to look
        tqdm.std.time = lambda moments=moments: next(moments)
        rows.map(lambda row: row, desc=kind, new_fingerprint=f"{name}{kind}")
    tqdm.std.time = lambda: 0.0
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
