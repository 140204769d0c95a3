"""What a reader looks for is found: ten questions of docs/faq.md, each two clicks or fewer from README, with its line."""

import re

import pytest
from common import ROOT

LINK = re.compile(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)")
CELLS = re.compile(r"^\| ([^|]+\?) \| \[[^]]*\]\(([\w./-]*)(#[\w-]+)?\) \| ([^|]+) \|$", re.MULTILINE)
FAQ = ROOT / "docs" / "faq.md"
QUESTIONS = CELLS.findall(FAQ.read_text(encoding="utf-8"))


def read(path):
    """Read a page with its line breaks as spaces, as a reader sees it; the table of questions itself is no answer."""
    text = CELLS.sub("", path.read_text(encoding="utf-8"))
    return " ".join(text.split())


def follow(pages):
    """Find the pages that pages link to."""
    return {(page.parent / link).resolve() for page in pages for link in LINK.findall(page.read_text(encoding="utf-8"))}


def test_there_are_ten():
    assert len(QUESTIONS) == 10


@pytest.mark.parametrize(("question", "page", "section", "line"), QUESTIONS, ids=[each[0] for each in QUESTIONS])
def test_the_answer_is_two_clicks_away(question, page, section, line):
    """README links to the page, or to one that does; the line stands there, below the section's head."""
    path = (FAQ.parent / page).resolve() if page else FAQ
    first = follow([ROOT / "README.md"])
    assert path in first or path in follow(first - {FAQ})
    text = read(path)
    assert line in text
    if section:
        heads = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        (head,) = [head for head in heads if re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") == section[1:]]
        assert text.index(head) < text.index(line)
