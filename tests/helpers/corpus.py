"""The programs of audited/: what the audit must say of each, by the comments at its head.

    # expect 4x4: tail              layout b x k, or b x k x N: the cause, or `exact`
    # also: logged_loss             causes that are as right, or true beside it
    # reference: 8x1x2              layout that it is compared with; if none is named, 16x1
    # mesh: dp=2,tp=2               what the processes are, under layouts of as many; b and k are given as they stand
    # weights: equal                the mistake does not reach the weights (check.py)
    # blind 1                       written without a look at how the audit decides, for that round (first_sight.json)
    # open                          not named yet: the audit must say no more than that the step is another one
    # thorough                      left out of `make test`: others of its cause, or of its library, are in it

Faults must be named; what is sound must not be accused.
"""

import ast
import dataclasses
import re
from pathlib import Path

from common import ROOT

from stepaudit.causes import HARMLESS, KINDS
from stepaudit.decisions import judge
from stepaudit.judge import Comparison
from stepaudit.recording import Recording
from stepaudit.script import BATCH, WINDOW, Variation

FOLDER = ROOT / "tests" / "audited"
TOLERANCE = 1e-5
EXACT = "exact"
Layout = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Program:
    """A training program, and what is wrong with it.

    Attributes:
        expected: layout -> cause, or `exact`.
        also: causes that are no mistake of the audit beside the expected one, or in its place.
        reference: layout that is the truth.
        is_blind: it was written without a look at how the audit decides.
        is_thorough: `make test` leaves it out.
        is_open: the audit does not name it yet.
        mesh: what --mesh says of as many processes; empty: nothing.
    """

    path: Path
    about: str
    expected: dict[Layout, str]
    also: frozenset[str]
    reference: Layout
    is_blind: bool
    is_thorough: bool
    is_open: bool = False
    mesh: str = ""

    def __str__(self) -> str:
        return f"{self.path.parent.name}/{self.path.stem}"

    @property
    def causes(self) -> list[str]:
        return [cause for cause in dict.fromkeys(self.expected.values()) if cause != EXACT]


def variation(layout: Layout, mesh: str = "") -> Variation:
    b, k, num_processes = layout
    own_mesh = (mesh if num_processes > 1 else "") if mesh else None
    return Variation({BATCH: str(b), WINDOW: str(k)}, num_processes, mesh=own_mesh)


def read(path: Path) -> Program:
    text = path.read_text(encoding="utf-8")
    expected = {layout(cut): cause for cut, cause in re.findall(r"^# expect (\S+): (\w+)$", text, re.MULTILINE)}
    also = {name for line in re.findall(r"^# also: (.+)$", text, re.MULTILINE) for name in line.split(", ")}
    (reference,) = re.findall(r"^# reference: (\S+)$", text, re.MULTILINE) or ["16x1"]
    unknown = (also | set(expected.values())) - KINDS.keys() - {EXACT}
    if not expected or unknown:
        raise ValueError(f"{path}: expects {expected}, unknown causes {unknown}")
    about = " ".join((ast.get_docstring(ast.parse(text)) or "").split())
    marks = [bool(re.search(f"^# {mark}$", text, re.MULTILINE)) for mark in (r"blind( \d+)?", "thorough", "open")]
    (mesh,) = re.findall(r"^# mesh: (\S+)$", text, re.MULTILINE) or [""]
    return Program(path, about, expected, frozenset(also), layout(reference), *marks, mesh)


def programs() -> list[Program]:
    return [read(path) for path in sorted(FOLDER.glob("*/*.py"))]


def audit(server, program: Program, reference: list[Recording], layout: Layout, num_steps: int = 0) -> Comparison:
    """Compare a layout with the recorded reference, in float32, too, where a program computes in 16 bits.

    Args:
        server: a `forked.Server` of `stepaudit.program`.
        num_steps: that are recorded; 0: all.
    """

    def record(layout: Layout, mode: str = "") -> list[Recording]:
        return server.record([str(program.path)], variation(layout, program.mesh), num_steps, mode=mode)

    def record_again(is_reference: bool, mode: str) -> list[Recording]:
        return record(program.reference if is_reference else layout, mode)

    return judge(reference, record(layout), TOLERANCE, record_again)


def verdict(program: Program, layout: Layout, comparison: Comparison) -> str:
    """Judge how right the audit was: `right`, `beside` (a false cause beside the right one), `misnamed`, `not_a_sum`, `missed`,
    `false alarm`."""
    cause, causes = program.expected[layout], {finding.cause for finding in comparison.findings}
    harmful = {finding.cause for finding in comparison.findings if not finding.is_harmless}
    wrong = harmful - program.also - {cause}
    if cause == EXACT:
        return "false alarm" if wrong else "right"
    if cause not in causes and not harmful & program.also:
        if not harmful and cause not in HARMLESS:
            return "missed"
        return "not_a_sum" if harmful == {"not_a_sum"} else "misnamed"
    return "beside" if wrong else "right"


def layout(text: str) -> Layout:
    """Read a layout from its text, b x k x N; one process if it names none."""
    b, k, *num_processes = map(int, text.split("x"))
    return b, k, *(num_processes or [1])
