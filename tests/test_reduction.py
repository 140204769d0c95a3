"""Nothing of a run asks which way or part it has, and the exact step works where all of those are deleted."""

import ast
import importlib
import sys

import pytest
from common import ROOT, metrics

from samestep.errors import UsageError
from samestep.training.parts import Part
from samestep.training.reduction import Reduction
from samestep.training.ways import PARTS, WAYS

ASKERS = ["run", "recovery", "report", "checkpoint", "launch", "micro_batch_size", "network", "starting", "plan"]
ASKERS += ["output_folder", "not_finite", "progress", "publishing", "parts"]
MARKS = {
    "exchange",
    "replicas",
    "folding",
    "exact_sum",
    "is_local",
    "Accumulating",
    "Replicated",
    "Exchanging",
    "LocalSteps",
    "SharedFolder",
    "fault_tolerance",
    "replicate_checkpoints",
    "checkpoint_store",
    "digest_steps",
    "noise_scale_steps",
    "is_cut_at_random",
    "growth",
    "record_samples",
    "report_to",
}
"""Names by which one way or part can be told from another, or from its absence."""
SAID = {"launch": {"fault_tolerance"}}  # `restart`: it is not of a way, but of torchrun's store


@pytest.mark.parametrize("module", ASKERS)
def test_no_condition_asks_which_way_it_is(module):
    tree = ast.parse((ROOT / "samestep" / "training" / f"{module}.py").read_text(encoding="utf-8"))
    tests = [node.test for node in ast.walk(tree) if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert)]
    names = {
        getattr(node, "attr", None) or getattr(node, "id", None)
        for test in tests
        for node in ast.walk(test)
        if isinstance(node, ast.Attribute | ast.Name)
    }
    assert names & MARKS <= SAID.get(module, set())


def test_ways_are_in_one_list():
    """Each is a reduction, the classes of `training.reduction` among them, and the last one takes every run."""
    for way, _ in WAYS:
        module, name = way.split(":")
        assert issubclass(getattr(importlib.import_module(module), name), Reduction)
    assert {way.partition(":")[2] for way, _ in WAYS} >= {"Reduction", "ExactSums"}
    assert WAYS[-1][1](None, None)
    for part, _ in PARTS:
        module, name = part.split(":")
        assert issubclass(getattr(importlib.import_module(module), name), Part)


def test_the_exact_step_needs_no_other_way(train, monkeypatch):
    """By default and reproducible; a way that is deleted is missed by who asks for it."""
    for name in [name for name in sys.modules if name.startswith("samestep.contrib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "samestep.contrib", None)
    flags = "--global_batch_size 6 --max_train_steps 2"
    train("default", flags, program="pretrain_gpt2")
    train("reproducible", f"{flags} --reproducible 3", program="pretrain_gpt2")
    with pytest.raises(UsageError, match=r"needs the package samestep\.contrib"):
        train("folded", f"{flags} --accumulation optimizer --second_moment unbiased", program="pretrain_gpt2")


@pytest.mark.parametrize(
    ("module", "name"), [("run", "Run"), ("report", "RunLog"), ("recovery", "Recovery"), ("checkpoint", "Saver")]
)
def test_what_asks_stays_small(module, name):
    """At most 300 lines, 15 attributes, a constructor of 8 arguments."""
    tree = ast.parse((ROOT / "samestep" / "training" / f"{module}.py").read_text(encoding="utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    stores = [node for node in ast.walk(found) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    (begin,) = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    assert found.end_lineno - found.lineno < 300
    assert len({node.attr for node in stores if ast.unparse(node.value) == "self"}) <= 15
    assert len(begin.args.args) + len(begin.args.kwonlyargs) <= 9


class Signs(Reduction):
    """The signs of the whole step's gradient, in place of the gradient (Bernstein et al. 2018, arXiv 1802.04434)."""

    def finish(self, attempt):
        super().finish(attempt)
        for parameter in attempt.recovery.model.parameters():
            parameter.grad.sign_()


@pytest.mark.parametrize("limit", ["none", "0.5"])
def test_a_new_way_is_a_class_and_a_line_of_the_list(train, limit):
    """As a maintainer adds one; clipping, log and checkpoint are those of every way."""
    WAYS.insert(0, ("test_reduction:Signs", lambda recipe, settings: recipe.seed == 11))
    try:
        flags = f"--global_batch_size 6 --max_train_steps 2 --max_grad_norm {limit}"
        folder = train("signs", f"{flags} --seed 11", program="pretrain_gpt2")
        usual = train("usual", f"{flags} --seed 12", program="pretrain_gpt2")
    finally:
        del WAYS[0]
    squares = [[line["grad_norm"] ** 2 for line in metrics(each)] for each in (folder, usual)]
    assert all(number > 100 and abs(number - round(number)) < 1e-3 * number for number in squares[0])
    assert max(squares[1]) < 100, "the list is asked for each run"
    assert (folder / "checkpoint-2").is_dir()
