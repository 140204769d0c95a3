"""The exact step is in few lines, which know of no optional way: those that docs/architecture.md names."""

import re

import pytest
from common import ROOT

DOCUMENT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SECTION = DOCUMENT.split("## The exact step")[1].split("\n## ")[0]
CORE = re.findall(r"^\| `([\w/]+\.py)` \|", SECTION, re.MULTILINE)
MAX_LINES = 3_000
WAYS = re.compile(
    r"replica|exchange|lighthouse|local_?sgd|diloco|power_?sgd|top_?k\b|folding|folded|accumulating\b|peers|checkpoint_store"
    r"|straggler|noise[_ ]scale|\bgrowth\b|digests\b|ledger|tracker|samestep\.contrib",
    re.IGNORECASE,
)
"""Words that name an optional way or part."""


def test_the_exact_step_is_read_in_an_hour():
    num_lines = {name: len((ROOT / "samestep" / name).read_text(encoding="utf-8").splitlines()) for name in CORE}
    assert len(CORE) > 10
    assert sum(num_lines.values()) <= MAX_LINES, num_lines
    (said,) = re.findall(r"([\d,]+) lines", SECTION)
    assert abs(sum(num_lines.values()) - int(said.replace(",", ""))) < 50


@pytest.mark.parametrize("name", CORE)
def test_it_knows_of_no_optional_way(name):
    lines = (ROOT / "samestep" / name).read_text(encoding="utf-8").splitlines()
    assert [f"{number}: {line}" for number, line in enumerate(lines, 1) if WAYS.search(line)] == []
