"""The learning rate over the steps: boundary values of the recipes, laws of every shape, and what is refused."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import UsageError
from samestep.recipe.schedule import SHAPES, STABLE, Schedule, warmup_steps


@st.composite
def schedules(draw):
    num_steps = draw(st.integers(1, 2000))
    kind = draw(st.sampled_from(sorted(SHAPES)))
    decay_ratio = draw(st.floats(0.01, 0.5))
    largest = num_steps - max(1, math.ceil(decay_ratio * num_steps)) if kind in STABLE else num_steps
    return Schedule(
        kind,
        peak=draw(st.floats(1e-6, 10)),
        num_steps=num_steps,
        num_warmup_steps=draw(st.integers(0, largest)),
        min_ratio=draw(st.floats(0, 1)),
        power=draw(st.floats(0.25, 4)),
        decay_ratio=decay_ratio,
    )


def test_the_shapes_have_the_published_names():
    assert list(SHAPES) == ["constant", "linear", "cosine", "polynomial", *STABLE]


def test_bert_base():
    """1,000,000 steps, 10,000 of warm-up, linear, 1e-4."""
    schedule = Schedule("linear", peak=1e-4, num_steps=1_000_000, num_warmup_steps=10_000)
    assert schedule(0) == pytest.approx(1e-8, rel=1e-12)
    assert schedule(4_999) == pytest.approx(5e-5, rel=1e-12)
    assert schedule(9_998) == pytest.approx(1e-4 * 9_999 / 10_000, rel=1e-12)
    assert schedule(9_999) == schedule(10_000) == 1e-4
    assert schedule(10_001) == pytest.approx(1e-4 * 989_999 / 990_000, rel=1e-12)
    assert schedule(505_000) == pytest.approx(5e-5, rel=1e-12)
    assert schedule(999_999) == pytest.approx(1e-4 / 990_000, rel=1e-9)
    assert schedule(1_000_000) == schedule(2_000_000) == 0.0


@given(step=st.integers(0, 100_000))
def test_bert_phase_two_goes_on_where_phase_one_stopped(step):
    whole = Schedule("linear", peak=1e-4, num_steps=1_000_000, num_warmup_steps=10_000)
    second = Schedule("linear", peak=1e-4, num_steps=1_000_000, num_warmup_steps=10_000, first_step=900_000)
    assert second(step) == whole(900_000 + step)


def test_the_first_step_of_bert_phase_two_by_hand():
    second = Schedule("linear", peak=1e-4, num_steps=1_000_000, num_warmup_steps=10_000, first_step=900_000)
    assert second(0) == pytest.approx(1e-4 * 10 / 99, rel=1e-12)


def test_captcha():
    """150 epochs of 16 steps, 5 epochs of warm-up, cosine from 6e-4 to 1e-6."""
    num_warmup_steps = warmup_steps(
        num_warmup_steps=None, warmup_epochs=5, warmup_ratio=None, num_steps=2_400, steps_per_epoch=50_030 // 3_072
    )
    assert num_warmup_steps == 80
    schedule = Schedule("cosine", 6e-4, 2_400, num_warmup_steps, min_ratio=1e-6 / 6e-4)
    assert schedule(0) == pytest.approx(6e-4 / 80, rel=1e-12)
    assert schedule(79) == schedule(80) == 6e-4
    assert 0.999999 * 6e-4 < schedule(81) < 6e-4
    assert schedule(1_240) == pytest.approx((6e-4 + 1e-6) / 2, rel=1e-12)
    assert 1e-6 < schedule(2_399) < 1.001e-6
    assert schedule(2_400) == schedule(10_000) == pytest.approx(1e-6, rel=1e-12)


def test_cosine_to_a_tenth():
    """nanoGPT's GPT-2: 600,000 steps, 2,000 of warm-up, 6e-4 to 6e-5."""
    schedule = Schedule("cosine", peak=6e-4, num_steps=600_000, num_warmup_steps=2_000, min_ratio=0.1)
    assert schedule(0) == pytest.approx(3e-7, rel=1e-12)
    assert schedule(1_999) == schedule(2_000) == 6e-4
    quarter = 2_000 + 598_000 // 4
    assert schedule(quarter) == pytest.approx(6e-5 + 5.4e-4 * (1 + math.sqrt(0.5)) / 2, rel=1e-12)
    assert schedule(301_000) == pytest.approx(3.3e-4, rel=1e-12)
    assert schedule(600_000) == pytest.approx(6e-5, rel=1e-12)


def test_constant_holds_the_peak_whatever_min_ratio():
    schedule = Schedule("constant", peak=3e-4, num_steps=10, num_warmup_steps=4, min_ratio=0.5)
    assert [schedule(step) / 3e-4 for step in range(12)] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1, 1, 1])


def test_polynomial_with_a_floor():
    schedule = Schedule("polynomial", peak=2.0, num_steps=110, num_warmup_steps=10, min_ratio=0.5, power=3.0)
    assert schedule(60) == pytest.approx(1.0 + 1.0 * 0.5**3, rel=1e-12)
    assert schedule(110) == 1.0


@given(schedule=schedules(), step=st.integers(0, 2100))
def test_polynomial_of_power_one_is_linear(schedule, step):
    fields = (schedule.peak, schedule.num_steps, schedule.num_warmup_steps, schedule.min_ratio)
    assert Schedule("polynomial", *fields, power=1.0)(step) == Schedule("linear", *fields)(step)


def test_the_fall_of_warmup_stable_decay_is_a_share_of_all_steps_not_of_those_after_the_warmup():
    schedule = Schedule(
        "warmup_stable_decay", 1.0, num_steps=1_000, num_warmup_steps=500, min_ratio=0.1, decay_ratio=0.2
    )
    assert schedule(799) == 1.0
    assert schedule(800) == pytest.approx(1.0, rel=1e-12)
    assert schedule(801) == pytest.approx(1 - 0.9 / 200, rel=1e-12)
    assert schedule(900) == pytest.approx(0.55, rel=1e-12)
    assert schedule(999) == pytest.approx(0.1 + 0.9 / 200, rel=1e-12)
    assert schedule(1_000) == schedule(1_001) == 0.1


def test_warmup_stable_decay_may_leave_no_stable_step_and_falls_for_one_step_at_least():
    tight = Schedule("warmup_stable_decay", 1.0, num_steps=10, num_warmup_steps=5, decay_ratio=0.5)
    assert [tight(step) for step in (4, 5, 6, 10)] == pytest.approx([1.0, 1.0, 0.8, 0.0], rel=1e-12)
    short = Schedule("warmup_stable_decay", 1.0, 10, 0, decay_ratio=0.01)
    assert short.num_decay_steps == 1
    assert [short(step) for step in (8, 9, 10)] == pytest.approx([1.0, 1.0, 0.0], rel=1e-12)


def test_the_fall_by_the_square_root_of_what_is_done():
    """Step 800 begins the fall; after a quarter of it half is gone, as Hägele et al. draw it."""
    schedule = Schedule(
        "warmup_stable_sqrt_decay", 1.0, num_steps=1_000, num_warmup_steps=500, min_ratio=0.1, decay_ratio=0.2
    )
    assert [schedule(step) for step in (499, 799, 800, 850, 1_000)] == pytest.approx([1, 1, 1, 0.55, 0.1], rel=1e-7)
    assert schedule(801) == pytest.approx(1 - 0.9 / 200**0.5, rel=1e-9)


def test_the_share_of_decay_is_taken_on_the_decimals_as_written():
    """0.07 * 100 is above 7 in floats, and 93 + 7 steps fit into 100."""
    assert Schedule("warmup_stable_decay", 1.0, 100, 93, decay_ratio=0.07).num_decay_steps == 7


@pytest.mark.parametrize("kind", SHAPES)
def test_without_warmup_the_first_step_is_at_the_peak(kind):
    schedule = Schedule(kind, peak=3e-4, num_steps=100, num_warmup_steps=0)
    assert schedule(0) == 3e-4
    assert schedule(100) == (3e-4 if kind == "constant" else 0.0)


@pytest.mark.parametrize("kind", sorted(SHAPES.keys() - set(STABLE)))
def test_the_warmup_may_take_the_whole_run(kind):
    schedule = Schedule(kind, peak=1.0, num_steps=4, num_warmup_steps=4, min_ratio=0.25)
    assert [schedule(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0 if kind == "constant" else 0.25]


@given(schedule=schedules())
def test_every_schedule_rises_to_its_peak_then_never_rises_and_ends_at_its_floor(schedule):
    peak, num_steps, num_warmup_steps = schedule.peak, schedule.num_steps, schedule.num_warmup_steps
    floor = peak if schedule.lr_scheduler_type == "constant" else peak * schedule.min_ratio
    rates = [schedule(step) for step in range(num_steps + 3)]
    rise, fall = rates[:num_warmup_steps], rates[num_warmup_steps:]
    assert all(0 < first < second for first, second in pairwise(rise))
    assert rise[-1:] == [peak][: len(rise)]
    if num_warmup_steps < num_steps:
        assert fall[0] == pytest.approx(peak, rel=1e-12)
    assert all(first >= second for first, second in pairwise(fall))
    assert rates[num_steps:] == [floor] * 3


GOOD = {"lr_scheduler_type": "linear", "peak": 1e-4, "num_steps": 100, "num_warmup_steps": 10}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("peak", value) for value in (-1e-4, math.nan, math.inf, "1e-4", None, True)),
        *(("num_steps", value) for value in (0, -1, 1e3, "100", None, True)),
        *(("num_warmup_steps", value) for value in (-1, 0.5, None, True)),
        *(("min_ratio", value) for value in (-0.1, 1.1, math.nan, None)),
        *(("power", value) for value in (0, -1.0, math.nan, None)),
        *(("decay_ratio", value) for value in (0, -0.1, 1.1, math.nan, None)),
        *(("first_step", value) for value in (-1, 0.5, None, True)),
    ],
)
def test_a_field_outside_its_range_is_named_with_its_value(field, value):
    with pytest.raises(UsageError) as error:
        Schedule(**{**GOOD, field: value})
    (problem,) = error.value.problems
    assert problem.startswith(f"{field} {value!r} must be ")


@pytest.mark.parametrize(
    "fields",
    [
        {"peak": 0},
        {"num_warmup_steps": 0},
        {"num_warmup_steps": 100},
        {"min_ratio": 0},
        {"min_ratio": 1},
        {"decay_ratio": 1},
        {"first_step": 99},
        {"num_steps": 1, "num_warmup_steps": 0},
        {"lr_scheduler_type": "warmup_stable_decay", "decay_ratio": 0.9},
    ],
)
def test_the_edges_of_the_ranges_are_allowed(fields):
    Schedule(**{**GOOD, **fields})


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"num_warmup_steps": 101}, ("num_warmup_steps 101", "num_steps 100", "100 steps or less")),
        ({"first_step": 100}, ("first_step 100", "num_steps 100", "raise it")),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "decay_ratio": 0.91},
            ("decay_ratio 0.91", "91 of the 100 num_steps", "only 90", "Lower decay_ratio"),
        ),
        ({"lr_scheduler_type": "cosin"}, ("lr_scheduler_type 'cosin' is unknown", "did you mean cosine?")),
        (
            {"lr_scheduler_type": "zzz"},
            ("valid names: constant, cosine, linear, polynomial, warmup_stable_decay, warmup_stable_sqrt_decay",),
        ),
        ({"lr_scheduler_type": None}, ("lr_scheduler_type None is unknown",)),
    ],
)
def test_one_mistake_gives_one_problem_with_rule_and_remedy(fields, parts):
    with pytest.raises(UsageError) as error:
        Schedule(**{**GOOD, **fields})
    (problem,) = error.value.problems
    for part in parts:
        assert part in problem


def test_all_problems_are_raised_at_once():
    with pytest.raises(UsageError) as error:
        Schedule("linaer", peak=-1.0, num_steps=10, num_warmup_steps=11, min_ratio=2.0, power=-1.0, first_step=10)
    assert [problem.split()[0] for problem in error.value.problems] == [
        "lr_scheduler_type",
        "peak",
        "min_ratio",
        "power",
        "num_warmup_steps",
        "first_step",
    ]


NO_WARMUP = {"num_warmup_steps": None, "warmup_epochs": None, "warmup_ratio": None}
RUN = {**NO_WARMUP, "num_steps": 1000, "steps_per_epoch": 16}


@pytest.mark.parametrize(
    ("warmup", "expected"),
    [
        ({"num_warmup_steps": 7}, 7),
        ({"num_warmup_steps": 0}, 0),
        ({"warmup_epochs": 5}, 80),
        ({"warmup_epochs": 0}, 0),
        ({"warmup_epochs": 0.5, "steps_per_epoch": 5}, 3),  # 2.5, half up
        ({"warmup_epochs": 0.5, "steps_per_epoch": 4.98}, 2),  # 2.49
        ({"warmup_epochs": 1.5, "steps_per_epoch": 3}, 5),  # 4.5, up as well: not to the even number
        ({"warmup_ratio": 0.1}, 100),
        ({"warmup_ratio": 0}, 0),
        ({"warmup_ratio": 1}, 1000),
        ({"warmup_ratio": 0.29, "num_steps": 50}, 15),  # 14.5, which floats take for 14.499999999999998
        ({"warmup_ratio": 0.0014}, 1),
    ],
)
def test_the_warmup_in_steps(warmup, expected):
    assert warmup_steps(**{**RUN, **warmup}) == expected


@pytest.mark.parametrize(
    ("warmup", "fields"),
    [
        ({}, "none of them"),
        ({"num_warmup_steps": 0, "warmup_ratio": 0.0}, "num_warmup_steps 0, warmup_ratio 0.0"),
        ({"num_warmup_steps": 80, "warmup_epochs": 5}, "num_warmup_steps 80, warmup_epochs 5"),
        ({"warmup_epochs": 5, "warmup_ratio": 0.1}, "warmup_epochs 5, warmup_ratio 0.1"),
    ],
)
def test_the_warmup_is_given_in_exactly_one_way(warmup, fields):
    with pytest.raises(UsageError) as error:
        warmup_steps(**{**RUN, **warmup})
    assert "exactly one of num_warmup_steps, warmup_epochs, warmup_ratio" in str(error.value)
    assert f"found {fields}: " in str(error.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_warmup_steps": -1},
        {"num_warmup_steps": 1.5},
        {"warmup_epochs": -0.1},
        {"warmup_epochs": math.inf},
        {"warmup_ratio": -0.1},
        {"warmup_ratio": 1.1},
        {"warmup_ratio": 0.1, "num_steps": 0},
        {"warmup_epochs": 1, "steps_per_epoch": 0},
        {"warmup_epochs": 1, "steps_per_epoch": math.nan},
    ],
)
def test_a_warmup_outside_its_range_is_named_with_its_value(wrong):
    name, value = list(wrong.items())[-1]
    with pytest.raises(UsageError) as error:
        warmup_steps(**{**RUN, **wrong})
    (problem,) = error.value.problems
    assert problem.startswith(f"{name} {value!r} must be ")
