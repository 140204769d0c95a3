"""Every remedy that the audit prints is applied to a program with the fault, and the audit says exact of what comes out."""

import dataclasses
import re
from pathlib import Path

import corpus
import pytest
from cases import keep
from common import ROOT

from stepaudit import Cut, audit_step
from stepaudit.causes import HARMLESS, KINDS
from stepaudit.judge import find_faults

AUDITED = ROOT / "tests" / "audited"
TABLE = AUDITED / "remedies.md"
ELSEWHERE = {
    "not_summed": "of a loss without a loop: below",
    "batch_size": "a flag of the audit, or a number that the program divides",
    "rounding": "to do nothing, or a tolerance of the audit: test_audit_rounding.py",
    "resume_weights": "of a run that is killed: test_audit_resume.py has the program without the fault",
    "resume_samples": "of a run that is killed: test_audit_resume.py has the program without the fault",
    "resume_state": "of a run that is killed: test_audit_resume.py has the program without the fault",
}
"""Causes without a place in the table, and why."""
ALWAYS = ("padding", "shifted_labels", "last_window", "first_window", "other_samples", "changed_between", "average")
ALWAYS += ("ticks_per_process", "not_reduced", "logged_loss")
"""Causes of which `make test` applies the first remedy: of different kinds, and cheap."""


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A remedy, applied to a program.

    Attributes:
        words: those of the cause's remedy that are followed.
        is_code: they are copied.
        changes: lines, and those that take their place.
    """

    cause: str
    path: Path
    words: str
    is_code: bool
    changes: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"{self.cause}-{self.path.stem}"

    @property
    def program(self) -> corpus.Program:
        return corpus.read(self.path)

    def apply(self) -> str:
        text = self.path.read_text(encoding="utf-8")
        for old, new in self.changes:
            assert f"\n{text}".count(f"\n{old}") == 1, f"{self}: not once in the program:\n{old}"
            text = f"\n{text}".replace(f"\n{old}", f"\n{new}")[1:]
        return text


def read_change(hunk: str) -> tuple[str, str]:
    r"""Read the lines of one place before and after the change.

    >>> read_change("  a\n- b\n+ c\n+\n")
    ('a\nb\n', 'a\nc\n\n')
    """
    old, new = ("".join(f"{line[2:]}\n" for line in hunk.splitlines() if line[:1] != sign) for sign in "+-")
    return old, new


def read_table() -> list[Remedy]:
    remedies = []
    for section in re.split(r"^## ", TABLE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        cause = section.split("\n", 1)[0]
        for file, words, diff in re.findall(r"^\[.*?\]\((.*?)\):\s(.*?)\n\n```diff\n(.*?)^```$", section, re.M | re.S):
            changes = tuple(read_change(hunk) for hunk in diff.split("...\n"))
            remedies.append(Remedy(cause, AUDITED / file, words.strip("`"), words.startswith("`"), changes))
    return remedies


REMEDIES = read_table()
FIRSTS = list({remedy.cause: remedy for remedy in reversed(REMEDIES)}.values())


def squeeze(text: str) -> str:
    return " ".join(text.split())


def test_no_cause_is_left_out():
    assert [cause for cause in KINDS if cause not in ELSEWHERE] == list(dict.fromkeys(r.cause for r in REMEDIES))
    assert set(ELSEWHERE) <= set(KINDS)


def test_the_table_does_what_is_printed():
    for remedy in REMEDIES:
        assert remedy.cause in remedy.program.causes
        assert remedy.words in KINDS[remedy.cause].remedy, remedy
        if remedy.is_code:
            assert squeeze(remedy.words) in squeeze("".join(new for _, new in remedy.changes)), remedy
        assert remedy.apply() != remedy.path.read_text(encoding="utf-8")


@pytest.mark.distributed
@pytest.mark.parametrize("remedy", keep(REMEDIES, [r for r in FIRSTS if r.cause in ALWAYS]), ids=str)
def test_the_audit_says_exact_after_it(server, tmp_path, remedy):
    """In all layouts that show the cause, or were exact before; test_audit_script.py has the programs as they are."""
    program = remedy.program
    layouts = [layout for layout, cause in program.expected.items() if cause in (remedy.cause, corpus.EXACT)]
    if program.is_open or remedy.path.parent == AUDITED:  # no other test names the cause
        before = corpus.audit(server, program, record(server, program), layouts[0])
        assert not before.is_exact or remedy.cause in {finding.cause for finding in before.findings}
    program = dataclasses.replace(program, path=tmp_path / remedy.path.name)
    program.path.write_text(remedy.apply(), encoding="utf-8")
    reference = record(server, program)
    assert {finding.cause for finding in find_faults(reference)} <= HARMLESS - {remedy.cause}
    for layout in layouts:
        comparison = corpus.audit(server, program, reference, layout)
        assert comparison.is_exact, (layout, comparison.findings)
        assert remedy.cause not in {finding.cause for finding in comparison.findings}
        assert len(comparison.errors) == len(reference[0].steps)


def record(server, program: corpus.Program) -> list:
    return server.record([str(program.path)], corpus.variation(program.reference))


# ---------------------------------------------------------------------------------------------------- by hand

CUTS = [Cut(2)]


@pytest.fixture
def tagger():
    """Give tagger(old, new), which makes the first example of docs/audit.md with a change."""
    (text, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "audit.md").read_text("utf-8"), re.DOTALL)

    def make(old: str = "", new: str = "") -> list:
        assert old in text
        namespace: dict = {}
        exec(text.replace(old, new) if old else text, namespace)
        return [namespace["Tagger"](), *(namespace[name] for name in ("SAMPLES", "collate", "loss"))]

    return make


def test_of_not_summed(tagger):
    """And of `counts`, where there is no loop."""
    sum_of = ', reduction="sum"'
    assert sum_of.removeprefix(", ") in KINDS["not_summed"].remedy
    assert audit_step(*tagger(sum_of), cuts=CUTS).causes == {"not_summed"}
    assert "(labels != -100).sum(), not labels.numel()" in KINDS["counts"].remedy
    assert audit_step(*tagger("(tags != -100).sum()", "tags.numel()"), cuts=CUTS).causes == {"counts"}
    assert audit_step(*tagger(), cuts=CUTS).is_exact
