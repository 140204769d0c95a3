"""Every remedy that the audit prints is applied to a program with the fault, and the audit says exact of what comes out."""

import dataclasses
import json
import re
from pathlib import Path

import corpus
import pytest
import torch
from cases import keep
from common import ROOT
from test_audit_resume import PROGRAM as RESUMED
from test_audit_resume import RESUME, VARY

from stepaudit import Cut, audit_step
from stepaudit.causes import HARMLESS, KINDS
from stepaudit.judge import find_faults
from stepaudit.script import audit_script

AUDITED = ROOT / "tests" / "audited"
TABLE = AUDITED / "remedies.md"
BY_HAND = {
    "not_summed": "of a loss without a loop",
    "batch_size": "a flag of the audit",
    "rounding": "a tolerance of the audit",
    "resume_weights": "of a run that is killed",
    "resume_samples": "of a run that is killed",
    "resume_state": "of a run that is killed",
}
"""Causes without a place in the table, and why: a test of its own applies the remedy of each."""
IN_WORDS = {
    "batch_norm": "GroupNorm is a word; module.eval() would be the other remedy",
    "packing": "a mask is another one in every model; packing=False would be the other remedy",
    "counts": "what is no target has another name in every program",
    "dropped": "drop_last=False is for those who said True",
    "other_samples": "the code is for Accelerate",
    "not_sharded": "samples have another name in every program",
    "gradient_hooks": "the code says where",
    "average": "averages have another method in every library",
}
"""Causes whose remedy prints code that the table does not copy, and why."""
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
    assert [cause for cause in KINDS if cause not in BY_HAND] == list(dict.fromkeys(r.cause for r in REMEDIES))
    assert set(BY_HAND) <= set(KINDS)
    for cause in BY_HAND:
        assert any(cause.startswith(name.removeprefix("test_of_")) for name in globals() if name.startswith("test_of_"))


def test_the_table_does_what_is_printed():
    for remedy in REMEDIES:
        assert remedy.cause in remedy.program.causes
        assert remedy.words in KINDS[remedy.cause].remedy, remedy
        if remedy.is_code:
            assert squeeze(remedy.words) in squeeze("".join(new for _, new in remedy.changes)), remedy
        assert remedy.apply() != remedy.path.read_text(encoding="utf-8")


def test_code_that_is_printed_is_copied():
    """The ways with samestep are those of test_own_loops.py."""
    own = {cause: kind.remedy.split("; shortest with samestep")[0] for cause, kind in KINDS.items()}
    printed = {cause for cause, remedy in own.items() if re.search(r"\w\(|\w=|==", remedy)}
    assert printed - {remedy.cause for remedy in REMEDIES if remedy.is_code} - set(BY_HAND) == set(IN_WORDS)


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
    return server.record([str(program.path)], corpus.variation(program.reference, program.mesh))


# ---------------------------------------------------------------------------------------------------- by hand

CUTS = [Cut(2)]


def read_causes(capsys) -> list[str]:
    """Read the causes of the second layout from what the command printed."""
    (comparison,) = json.loads(capsys.readouterr().out)["comparisons"]
    return [finding["cause"] for finding in comparison["findings"]]


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


def test_of_padding_in_a_recurrent_layer(tagger):
    """A GRU that reads its sentences backwards begins with the padding, if it is not told where they end."""

    def audit(is_packed: bool):
        class Reader(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.words, self.tags = torch.nn.Embedding(100, 16), torch.nn.Linear(16, 5)
                self.rnn = torch.nn.GRU(16, 8, batch_first=True, bidirectional=True)

            def forward(self, words):
                states = self.words(words)
                if is_packed:
                    lengths = (words > 0).sum(1)
                    states = torch.nn.utils.rnn.pack_padded_sequence(states, lengths, True, enforce_sorted=False)
                states, _ = self.rnn(states)
                if is_packed:
                    states, _ = torch.nn.utils.rnn.pad_packed_sequence(states, True)
                return self.tags(states)

        _, samples, collate, loss = tagger()
        return audit_step(Reader(), [(words + 1, tags) for words, tags in samples], collate, loss, cuts=CUTS)

    assert "torch.nn.utils.rnn.pack_padded_sequence" in KINDS["padding"].remedy
    assert audit(is_packed=False).causes == {"padding"}
    assert audit(is_packed=True).is_exact


def test_of_a_trainer():
    """Who has a Trainer is not told of loops alone."""
    for name in ("mean_of_means", "tail", "duplicated", "other_samples", "ignores_num_items", "shifted_labels"):
        assert "exact(Trainer)" in KINDS[name].remedy, name


def test_of_rounding(tagger):
    assert "a tolerance that suits the precision" in KINDS["rounding"].remedy
    cuts = [Cut(2), Cut(2, dtype="float32")]
    assert audit_step(*tagger(), cuts=cuts, tolerance={"float32": 1e-12}).causes == {"rounding"}
    assert audit_step(*tagger(), cuts=cuts).is_exact


@pytest.mark.distributed
def test_of_batch_size(server, tmp_path, capsys):
    """The flag that is per process is named; or the program divides it."""
    assert "--per_process FLAG" in KINDS["batch_size"].remedy
    assert "let the script divide the global batch by k * N" in KINDS["batch_size"].remedy
    text, program = (AUDITED / "logged_loss.py").read_text(encoding="utf-8"), tmp_path / "program.py"
    text = text.replace("b, k = flags()\n", 'import sys\nb, k = int(sys.argv[1].partition("=")[2]), 1\n')

    def audit(text: str, *more: str) -> tuple[int, set[str]]:
        program.write_text(text, encoding="utf-8")
        words = ["--vary", "batch=16", "--processes", "1,2", "--steps", "2", "--json", *more, "--", str(program)]
        code = audit_script(words, run_program=server.record)
        return code, set(read_causes(capsys)) - HARMLESS

    assert audit(text) == (1, {"batch_size"})
    assert audit(text, "--per_process", "batch") == (0, set())
    assert audit(text.replace("batch_size=b", "batch_size=b // accelerator.num_processes")) == (0, set())


LINES = {
    "resume_weights": (
        '    if flags.fault != "parameters":\n        model.load_state_dict(saved["model"])\n',
        "load the newest checkpoint into the model before the first step",
    ),
    "resume_samples": ("rest = order[first * flags.batch * flags.k:]\n", "how many samples of the epoch were used"),
    "resume_state": (
        '    if flags.fault != "optimizer":\n        optimizer.load_state_dict(saved["optimizer"])\n',
        "save and load optimizer.state_dict()",
    ),
}
"""Lines of the program of test_audit_resume.py that are the remedy: without them it has the fault; and the remedy's words."""


@pytest.mark.distributed
@pytest.mark.parametrize("cause", keep(LINES, []))
def test_of_resume(server, tmp_path, capsys, cause):
    lines, words = LINES[cause]
    assert words in KINDS[cause].remedy
    program, found = tmp_path / "toy.py", []
    for text in (RESUMED.replace(lines, "rest = order\n" if "rest" in lines else ""), RESUMED):
        program.write_text(text, encoding="utf-8")
        argv = [*VARY[:2], *RESUME, "--json", "--", str(program), "--output_dir", "{folder}"]
        audit_script(argv, run_program=server.record)
        found.append(read_causes(capsys))
    assert found == [[cause], []]
