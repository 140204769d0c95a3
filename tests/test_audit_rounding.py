"""Layouts of a program in 16 bits differ by rounding, or by a fault that float32 shows."""

import numpy as np
import pytest
import torch
from torch import nn

from stepaudit.errors import UsageError
from stepaudit.interview import Interview
from stepaudit.judge import _find_wrong_log as find_wrong_log
from stepaudit.judge import compare
from stepaudit.recording import MicroStep, Recording, Step
from stepaudit.rounding import BOUNDS, settle
from stepaudit.track import Track

TRUTH = np.random.default_rng(1).standard_normal((4, 200))  # gradients of 4 micro-batches


def record(noise: float = 0.0, factor: float = 1.0, dtypes: tuple[str, ...] = ("bfloat16",)) -> list[Recording]:
    parts = TRUTH * factor + noise * np.random.default_rng(2).standard_normal(TRUTH.shape)
    micro_steps = [MicroStep(parts[: q + 1].sum(0), q == 0, False, False, part=part) for q, part in enumerate(parts)]
    gradient = parts.sum(0)
    step = Step(gradient, gradient, -gradient, [0.1], 1, micro_steps)
    return [Recording(names=["w"], shapes=[[200]], sizes=[200], steps=[step], short_dtypes=list(dtypes))]


def judge(noise: float, factor: float = 1.0, dtypes: tuple[str, ...] = ("bfloat16",), can_lengthen: bool = True):
    reference, other, asked = record(dtypes=dtypes), record(noise, factor, dtypes), []

    def record_in_float32(is_reference: bool) -> list[Recording]:
        asked.append(is_reference)
        if not can_lengthen:
            raise UsageError("it failed:\n  TypeError: a dtype of its own")
        return record(dtypes=()) if is_reference else record(0.0, factor, ())

    comparison = settle(compare(reference, other, 1e-5), reference, other, 1e-5, record_in_float32)
    return comparison, [(f.cause, f.is_harmless) for f in comparison.findings], asked


def test_rounding_is_no_failure():
    comparison, findings, asked = judge(0.003)
    assert comparison.is_exact
    assert findings == [("rounding", True)]
    assert asked == [True, False]
    assert "in float32 0," in comparison.findings[0].evidence


@pytest.mark.parametrize("factor", [1.01, 4.0])
def test_a_fault_is_named_beside_the_rounding(factor):
    comparison, findings, _ = judge(0.003, factor)
    assert not comparison.is_exact
    assert findings == [("factor", False)]


def test_more_than_the_dtype_explains_is_a_failure():
    comparison, findings, _ = judge(0.3)
    assert not comparison.is_exact
    assert findings == [("rounding", False)]


@pytest.mark.parametrize(("noise", "is_exact"), [(0.003, True), (2 * BOUNDS["bfloat16"], False)])
def test_what_cannot_be_computed_in_float32_has_a_bound(noise, is_exact):
    comparison, findings, _ = judge(noise, can_lengthen=False)
    assert comparison.is_exact == is_exact
    assert findings == ([("rounding", True)] if is_exact else [("not_a_sum", False)])
    assert ("TypeError: a dtype of its own" in comparison.findings[0].evidence) == is_exact


def test_nothing_is_asked_without_16_bits_or_without_a_difference():
    assert judge(0.003, dtypes=())[2] == judge(0.0)[2] == []
    assert not judge(0.003, dtypes=())[0].is_exact


def test_shared_parameters_are_not_asked_for_terms():
    """FSDP would reduce what a question computes into the program's own gradients."""
    p = nn.Parameter(torch.ones(3))
    track, interview = Track(None, {"w": p}), Interview(is_wanted=True)
    assert len(interview.ask_terms(p.square().sum() + p.tanh().sum(), [track])[0][track]) == 2
    p.full_tensor = lambda: p
    assert interview.ask_terms(p.square().sum() + p.tanh().sum(), [track]) == ({}, [])


@pytest.mark.parametrize(
    ("true_loss", "logged", "is_named"), [(1e-8, -2e-8, False), (1e-3, 2e-3, True), (2.0, 2.001, False)]
)
def test_a_logged_loss_may_be_rounded(true_loss, logged, is_named):
    """Where terms cancel, as advantages do, what is left is what they were rounded by."""
    assert bool(find_wrong_log([logged], true_loss, "step 1", 4, 1)) == is_named
