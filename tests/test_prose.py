"""Sentences of README, docs/ and of what programs say are short: docs/prose.py, docs/strings.py, `make prose`."""

import re

import pytest
from common import load_docs_program

prose = load_docs_program("prose")
strings = load_docs_program("strings")
PAGES = prose.pages()


@pytest.mark.parametrize("name", sorted(PAGES))
def test_sentences_and_pages_are_short(name):
    assert not prose.find_long(name, PAGES[name])
    assert prose.count_words(PAGES[name]) <= prose.MAX_PAGE


def test_a_long_sentence_is_found():
    """Also behind an item, a link, a name of a program with a dot, and where it goes on after a line of code."""
    words = " ".join(["word"] * 15)
    for text in (f"- {words},\n  {words}.", f"[{words}](x.md) {words}.", f"{words} `samestep.cut`, {words}."):
        assert prose.find_long("docs/x.md", text), text
    for text in (f"{words}. {words}.", f"- {words}\n- {words}", f"| {words} {words} |", f"```\n{words} {words}\n```"):
        assert not prose.find_long("docs/x.md", text), text
    assert prose.find_long("README.md", f"{words} {words[:29]}.")
    assert not prose.find_long("docs/x.md", f"{words} {words[:29]}.")


def test_the_glossary_is_short_and_used():
    """At most 30 words, each of which other pages use; the site explains those that mean one thing."""
    words = re.findall(r"^\| ([\w -]+) \| ", PAGES["docs/glossary.md"], re.MULTILINE)[1:]
    assert 0 < len(words) <= 30
    others = " ".join(text for name, text in PAGES.items() if name != "docs/glossary.md").lower()
    assert [word for word in words if len(re.findall(rf"\b{word}", others)) < 2] == []
    explained = load_docs_program("hook").list_words()
    assert explained.keys() < set(words)


def test_what_programs_say_is_short():
    """Messages, help and logs: no sentence of more words than on a page."""
    seen = strings.list_strings()
    assert len(seen) > 3000
    assert [each for each in seen if each.words > prose.MAX_WORDS] == []


def test_a_long_message_is_found(tmp_path):
    """Through values and parts of a string; docstrings, texts below constants and single words are not seen."""
    words = " ".join(["word"] * 12)
    (tmp_path / "samestep").mkdir()
    (tmp_path / "samestep" / "x.py").write_text(
        f'"""{words} {words} {words}"""\nA = 1\n"""{words} {words} {words}"""\n'
        f'def f(n):\n    raise ValueError(f"{words} {{n + len(\'a b\')}} "\n        "{words} word")\n'
        f'B = ["word", "{words}. {words}"]\n'
    )
    assert [(each.line, each.words) for each in strings.list_strings(tmp_path)] == [(5, 26), (5, 2), (7, 12)]
