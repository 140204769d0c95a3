"""What the documentation says is run."""

import dataclasses
import doctest
import re
import sys

import pytest
import torch
from common import ROOT, fresh_accelerator, load_docs_program

import samestep
import stepaudit as audit
from samestep.recipe import run_settings
from samestep.recipe.catalog import TASKS
from stepaudit.causes import KINDS, Finding
from stepaudit.pytest_plugin import add_processes

DOCUMENT = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
TAGGER, LOOP, PACKING = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)


@pytest.mark.distributed
def test_the_examples_of_the_audit(pytester):
    """As a user's own tests, in a folder of their own: the first passes, also on two processes; the second fails as said."""
    pytester.makepyfile(test_tagger=TAGGER, test_loop=LOOP)
    result = pytester.runpytest_subprocess("--audit-processes", "1,2", "test_tagger.py")
    result.assert_outcomes(passed=1)
    result = pytester.runpytest_subprocess("test_loop.py")
    result.assert_outcomes(failed=1)
    (lines,) = re.findall(r"```text\n(\[1\] .*?)\n```", DOCUMENT, re.DOTALL)
    assert f"{lines}\n    do: " in result.stdout.str()
    assert "NOT exact" in result.outlines
    assert not [line for line in result.outlines if "Traceback" in line or line.startswith(">")]


def test_the_example_of_packed_rows():
    exec(PACKING, {})


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, {"processes": [1, 2]}), ({"cuts": []}, {"cuts": []}), ({"processes": (3,)}, {"processes": (3,)})],
)
def test_the_option_gives_processes_where_a_test_gives_none(given, expected):
    assert add_processes(given, [1, 2]) == expected
    assert add_processes(given, None) == given


def test_every_cause_is_explained():
    """In a section of its own, to which each finding points."""
    sections = dict(re.findall(r"^### (\w+)\n\n(.*?)(?=^##|^<!--)", DOCUMENT, re.MULTILINE | re.DOTALL))
    assert list(sections) == list(KINDS)
    for name, cause in KINDS.items():
        assert sections[name].lower().startswith(cause.text.lower())
        assert f"**Do:** {cause.remedy}." in sections[name]
        assert Finding(name, "", "").remedy.endswith(f"(docs/audit.md#{name})")


def test_the_loop_of_accumulation_in_the_optimizer():
    """It runs as it stands, and its steps are torch's SGD on the mean of each window's micro-batches."""
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "accumulation.md").read_text(encoding="utf-8"), re.DOTALL
    )
    fresh_accelerator()
    torch.manual_seed(0)
    namespace: dict = {}
    exec(code, namespace)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    samples = torch.randn(8, 5, 3)
    for window in samples.split(4):
        optimizer.zero_grad()
        model(window).square().mean().backward()
        optimizer.step()
    assert torch.allclose(namespace["model"].weight, model.weight, atol=1e-6)
    assert namespace["norm"].item() == pytest.approx(
        torch.stack([p.grad.norm() for p in model.parameters()]).norm().item(), rel=1e-5
    )


def test_examples_of_what_writes_documents():
    reference = load_docs_program("reference")
    assert doctest.testmod(reference).failed == 0
    assert doctest.testmod(sys.modules["tables"]).failed == 0


def test_the_reference_is_current():
    """What `make docs` writes: every field of recipes, every public name, tables of what was measured and is planned."""
    reference = load_docs_program("reference")
    for document, name in reference.PARTS:
        assert (ROOT / document).read_text(encoding="utf-8") == reference.write(document, name), (
            f"{document}: make docs"
        )
    fields, names = reference.fields(), reference.names()
    for recipe in TASKS.values():
        assert not [field.name for field in dataclasses.fields(recipe) if f"\n| `{field.name}`" not in fields]
    assert not [name for name in (*samestep.__all__, *audit.__all__) if f"\n| `{name}` | " not in names]


def test_the_commands_of_watching_are_understood():
    text = (ROOT / "docs" / "watching.md").read_text(encoding="utf-8")
    commands = re.findall(r"^accelerate launch .* scripts/pretrain_bert\.py (.*) \\\n  (.*)$", text, re.MULTILINE)
    assert len(commands) == 2
    for flags in commands:
        run_settings.parse(" ".join(flags).split(), "bert_pretraining", "")
