"""docs/architecture.md is true: the way of a sample is the one that a training goes, and the map names every module."""

import re
import sys
from pathlib import Path

from common import ROOT, fresh_accelerator, tiny_argv

DOCUMENT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_a_sample_goes_the_way_that_is_written(scripts, corpus, tmp_path):
    """Functions are called in the order of the table; before, some are tried on samples that mean nothing."""
    section = DOCUMENT.split("## The way of a sample")[1].split("\n## ")[0]
    written = re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE)
    assert len(written) > 20
    package, called = str(ROOT / "samestep"), []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            called.append((frame.f_code.co_filename, frame.f_code.co_qualname))

    flags = "--validation_fraction 0 --max_train_steps 1 --num_warmup_steps 0"
    fresh_accelerator()
    sys.setprofile(note)
    try:
        scripts["pretrain_bert"].main(tiny_argv("pretrain_bert", corpus, tmp_path / "run", flags))
    finally:
        sys.setprofile(None)
    names = (".".join([*Path(file).relative_to(package).with_suffix("").parts, function]) for file, function in called)
    assert [name for name in written if name not in names] == []  # each is looked for behind the one before


def test_the_map_names_every_module():
    modules = {path.stem for path in (ROOT / "samestep").glob("*/*.py")} - {"__init__"}
    assert {name for name in modules if not re.search(rf"\b{name}\b", DOCUMENT)} == set()
