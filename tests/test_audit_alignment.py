"""Steps of two layouts are paired by their samples, where one of them has taken a step more or fewer in between."""

import numpy as np
import pytest

from stepaudit.alignment import align
from stepaudit.judge import compare
from stepaudit.recording import MicroStep, Recording, Step

WHOLE = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17]]


def make_layout(
    windows: list[list[int]], rates: list[float] | None = None, num_processes: int = 1, has_moved: bool = False
) -> list[Recording]:
    """Make the recordings of a layout: each sample n adds n and 1 to the gradient; processes take turns in a window."""
    recordings = []
    for rank in range(num_processes):
        steps = []
        for t, window in enumerate(windows):
            gradient = np.array([float(sum(window)), float(len(window))])
            samples = window[rank::num_processes]
            part = num_processes * np.array([float(sum(samples)), float(len(samples))])
            micro_step = MicroStep(
                gradient, True, False, True, part=part, loss=1.0, samples=samples, num_rows=len(samples)
            )
            steps.append(Step(gradient, gradient, -gradient, [rates[t] if rates else 0.1], 1, [micro_step]))
        recordings.append(
            Recording(
                num_processes=num_processes,
                process_index=rank,
                names=["w"],
                shapes=[[2]],
                sizes=[2],
                model="Toy",
                weights=np.ones(2),
                has_moved=has_moved,
                steps=steps,
            )
        )
    return recordings


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize(
    ("windows", "cause", "where", "evidence", "num_compared"),
    [
        (
            [*WHOLE[:2], [8], [9, 10, 11], *WHOLE[3:]],
            "num_steps",
            "step 3",
            "a window of 4 samples is 2 steps, of 1 and 3",
            4,
        ),
        (
            [WHOLE[0], [*WHOLE[1], *WHOLE[2]], *WHOLE[3:]],
            "num_steps",
            "step 2",
            "2 windows of the reference are one step",
            3,
        ),
        ([*WHOLE[:2], *WHOLE[3:]], "dropped", "step 3", "step 3 of the reference, of 4 samples, is not there", 4),
        (
            [*WHOLE[:3], [20, 21], *WHOLE[3:]],
            "dropped",
            "step 4",
            "in the reference: 2 samples that no step of it has",
            5,
        ),
        ([*WHOLE[:3], *WHOLE[1:3], *WHOLE[3:]], "duplicated", "step 4", "each of the steps 4 to 5, of 8 samples", 5),
    ],
)
def test_what_follows_from_a_shift_is_not_named(windows, cause, where, evidence, num_compared, num_processes):
    rates = [0.1 / (1 + t) for t in range(9)]  # of a schedule, which goes on with the steps
    comparison = compare(make_layout(WHOLE, rates), make_layout(windows, rates, num_processes), 1e-6)
    (finding,) = comparison.findings
    assert (finding.cause, finding.where) == (cause, where)
    assert finding.evidence.startswith(evidence)
    assert comparison.errors == [0.0] * num_compared


def test_a_step_behind_a_shift_is_compared():
    """With its own counterpart: its gradient is wrong, and says so."""
    layout = make_layout([*WHOLE[:1], *WHOLE[2:]])
    layout[0].steps[2].gradient = layout[0].steps[2].unclipped_gradient = 3 * layout[0].steps[2].gradient
    comparison = compare(make_layout(WHOLE), layout, 1e-6)
    assert "dropped" in {finding.cause for finding in comparison.findings}
    assert comparison.errors == [0, 0, pytest.approx(2), 0]


def test_rates_before_a_shift_are_compared():
    rates = [0.1, 0.2, 0.3, 0.4]
    comparison = compare(make_layout(WHOLE), make_layout([*WHOLE[:2], *WHOLE[3:]], rates), 1e-6)
    assert [finding.cause for finding in comparison.findings] == ["dropped", "learning_rate"]


@pytest.mark.parametrize(
    "windows",
    [
        WHOLE,
        [[0], [1, 2, 3, 4], [5, 6, 7, 8]],  # a first window of its own shifts all others
        [[0, 1], [2, 3], [4, 5], [6, 7]],  # a batch half as large is another batch size
        [*WHOLE[:3], [*WHOLE[3], *WHOLE[4]]],  # a rest that waits for the next window
        [[0, 1, 2, 3], [4, 5, 6, 8], [8, 9, 10, 11]],
    ],
)
def test_what_is_no_shift_is_left_as_it_is(windows):
    reference, other = make_layout(WHOLE), make_layout(windows)
    assert align(reference, other)[:3] == (reference, other, [])


def test_where_parameters_have_moved_nothing_behind_a_shift_is_compared():
    reference, other, (finding,), before = align(make_layout(WHOLE), make_layout(WHOLE[:2] + WHOLE[3:], has_moved=True))
    assert (len(reference[0].steps), len(other[0].steps), before, finding.cause) == (2, 2, 2, "dropped")
