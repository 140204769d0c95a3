"""Scaling with the batch: the published numbers, the identities behind them, and what is refused."""

import math
import re
from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import UsageError
from samestep.recipe.scaling import CONSERVATIVE_RANGES, RULES, Hyperparameters, kappa, scale

ADAM = Hyperparameters(learning_rate=1e-4, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8)

hyperparameters = st.builds(
    Hyperparameters,
    learning_rate=st.floats(0, 10),
    adam_beta1=st.floats(0, 1, exclude_max=True),
    adam_beta2=st.floats(0, 1, exclude_max=True),
    adam_epsilon=st.floats(0, 1),
    warmup_epochs=st.none() | st.floats(0, 100),
)


def test_the_rules_have_the_published_names():
    assert list(RULES) == ["none", "linear", "sqrt", "beta2_half_life", "conservative"]


@pytest.mark.parametrize("rule", RULES)
@given(tuned=hyperparameters, batch=st.integers(1, 10**6))
def test_nothing_changes_at_the_tuned_batch(rule, tuned, batch):
    assert scale(rule, tuned, batch, batch) == tuned


def test_none_keeps_the_tuned_numbers_at_any_batch():
    assert scale("none", ADAM, 32, 32_768) == ADAM


@pytest.mark.parametrize(
    ("learning_rate", "tuned_batch_size", "global_batch_size", "expected"),
    [(0.1, 256, 1024, 0.4), (0.1, 64, 512, 0.8), (0.1, 256, 8192, 3.2), (0.1, 256, 64, 0.025), (2e-4, 512, 1536, 6e-4)],
)
def test_linear_gives_the_published_learning_rates_to_the_last_bit(
    learning_rate, tuned_batch_size, global_batch_size, expected
):
    tuned = replace(ADAM, learning_rate=learning_rate)
    scaled = scale("linear", tuned, tuned_batch_size, global_batch_size)
    assert scaled == replace(tuned, learning_rate=expected)  # and nothing but the learning rate changes


@pytest.mark.parametrize(
    ("global_batch_size", "expected"),
    [
        (1024, Hyperparameters(2e-4, 0.6, 0.996, 5e-9)),  # kappa 4
        (64, Hyperparameters(5e-5, 0.975, 0.99975, 2e-8)),  # kappa 1/4
    ],
)
def test_sqrt_follows_malladi(global_batch_size, expected):
    assert scale("sqrt", ADAM, 256, global_batch_size) == expected


def test_sqrt_at_a_ratio_without_an_exact_root():
    scaled = scale("sqrt", ADAM, 256, 512)
    assert scaled.learning_rate == pytest.approx(1e-4 * 2**0.5, rel=1e-15)
    assert scaled.adam_epsilon == pytest.approx(1e-8 / 2**0.5, rel=1e-15)
    assert (scaled.adam_beta1, scaled.adam_beta2) == (0.8, 0.998)


@given(batch=st.integers(1, 2559), other=st.integers(1, 2559))
def test_sqrt_in_two_strides_is_sqrt_in_one(batch, other):
    middle = scale("sqrt", ADAM, 256, batch)
    assert astuple(scale("sqrt", middle, batch, other))[:4] == pytest.approx(
        astuple(scale("sqrt", ADAM, 256, other))[:4], rel=1e-9, abs=1e-12
    )


def test_sqrt_stops_just_below_kappa_times_one_minus_beta_of_one():
    """1 - 0.9 is below 0.1 in floats: only exact arithmetic refuses kappa = 10."""
    assert scale("sqrt", ADAM, 256, 2559).adam_beta1 == pytest.approx(1 / 2560)
    with pytest.raises(UsageError) as error:
        scale("sqrt", ADAM, 256, 2560)
    (problem,) = error.value.problems
    for part in ("global_batch_size 2560", "adam_beta1 0.9", "tuned at 256", "2559 or less", "0.1, times 10,"):
        assert part in problem


@pytest.mark.parametrize(("rule", "reach"), [("sqrt", 2559), ("conservative", 4096)])
def test_a_batch_beyond_a_rule_names_rules_that_reach_it(rule, reach):
    with pytest.raises(UsageError) as error:
        scale(rule, ADAM, 256, reach + 1)
    (problem,) = error.value.problems
    others = re.findall(r"\w+", problem.split("--lr_scaling_rule ")[1].replace(" or ", " "))
    assert others
    for other in others:
        scale(other, ADAM, 256, reach + 1)


def test_sqrt_names_both_moments_each_with_its_own_largest_batch():
    with pytest.raises(UsageError) as error:
        scale("sqrt", replace(ADAM, adam_beta2=0.95), 100, 2000)
    beta1, beta2 = error.value.problems
    assert "adam_beta1 0.9" in beta1
    assert "999 or less" in beta1
    assert "adam_beta2 0.95" in beta2
    assert "1999 or less" in beta2


@given(
    beta1=st.floats(0, 0.999), beta2=st.floats(0, 0.999), tuned_size=st.integers(1, 4096), size=st.integers(1, 10**6)
)
def test_sqrt_gives_usable_betas_or_names_the_largest_batch_that_does(beta1, beta2, tuned_size, size):
    tuned = Hyperparameters(1e-3, beta1, beta2, 1e-8)
    try:
        scaled = scale("sqrt", tuned, tuned_size, size)
    except UsageError as error:
        largest = min(int(problem.split(" or less")[0].split()[-1]) for problem in error.problems)
        assert tuned_size <= largest < size
        scale("sqrt", tuned, tuned_size, largest)
        with pytest.raises(UsageError):
            scale("sqrt", tuned, tuned_size, largest + 1)
    else:
        assert 0 <= scaled.adam_beta1 < 1
        assert 0 <= scaled.adam_beta2 < 1


@given(beta2=st.floats(0.5, 0.999), tuned_size=st.integers(32, 1024), size=st.integers(32, 1024))
def test_beta2_half_life_in_samples_stays(beta2, tuned_size, size):
    tuned = replace(ADAM, adam_beta2=beta2)
    scaled = scale("beta2_half_life", tuned, tuned_size, size)
    assert scaled.adam_beta2 ** (tuned_size / size) == pytest.approx(beta2, rel=1e-9)
    assert size / math.log(scaled.adam_beta2) == pytest.approx(tuned_size / math.log(beta2), rel=1e-9)
    assert replace(scaled, adam_beta2=beta2) == tuned  # and nothing but beta2 changes


def test_beta2_half_life_at_batch_one():
    scaled = scale("beta2_half_life", replace(ADAM, adam_beta2=0.95), 512, 1)
    assert scaled.adam_beta2 == pytest.approx(0.9999, abs=5e-7)
    assert scale("beta2_half_life", ADAM, 256, 512).adam_beta2 == pytest.approx(0.998001, rel=1e-15)


def test_the_conservative_table_is_the_published_one():
    assert CONSERVATIVE_RANGES == {
        2: ((1.5, 2), (3, 5)),
        4: ((2, 3), (5, 10)),
        8: ((2, 4), (10, 20)),
        16: ((3, 5), (20, 30)),
    }


@pytest.mark.parametrize(
    ("ratio", "factor", "warmup_epochs"),
    [(1, 1, None), (2, 1.5, 5), (4, 2, 10), (8, 2, 20), (16, 3, 30)],
)
def test_conservative_takes_the_lowest_rate_and_the_longest_warmup_of_each_row(ratio, factor, warmup_epochs):
    tuned = replace(ADAM, learning_rate=0.1)
    expected = replace(tuned, learning_rate=round(0.1 * factor, 15), warmup_epochs=warmup_epochs)
    assert scale("conservative", tuned, 256, 256 * ratio) == expected


@pytest.mark.parametrize(
    ("batch", "factor", "warmup_epochs"),
    [
        (3, 1 + 0.5 * math.log2(3 / 2), 5),  # between 1 and 2, the factor from 1 and the warm-up of x2
        (6, 1.5 + 0.5 * math.log2(3 / 2), 5 + 5 * math.log2(3 / 2)),
        (12, 2.0, 10 + 10 * math.log2(3 / 2)),
        (24, 2 + math.log2(3 / 2), 20 + 10 * math.log2(3 / 2)),
    ],
)
def test_conservative_is_linear_in_the_logarithm_between_rows(batch, factor, warmup_epochs):
    scaled = scale("conservative", ADAM, 2, batch)
    assert scaled.learning_rate == pytest.approx(1e-4 * factor, rel=1e-12)
    assert scaled.warmup_epochs == pytest.approx(warmup_epochs, rel=1e-12)


@given(first=st.integers(100, 1600), second=st.integers(100, 1600))
def test_conservative_never_falls_as_the_batch_grows_and_stays_below_linear(first, second):
    small, large = (scale("conservative", ADAM, 100, size) for size in sorted((first, second)))
    assert small.learning_rate <= large.learning_rate <= scale("linear", ADAM, 100, max(first, second)).learning_rate
    assert (small.warmup_epochs or 0) <= (large.warmup_epochs or 0)


@pytest.mark.parametrize("batch", [1, 255, 4097, 10**6])
def test_conservative_refuses_what_its_table_does_not_know(batch):
    with pytest.raises(UsageError, match=rf"global_batch_size {batch} .* from 256 to 4096"):
        scale("conservative", ADAM, 256, batch)


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_explains_the_captcha_learning_rate(rule):
    """1536 -> 3072 came with 2e-4 -> 6e-4: three times the rate for twice the batch, beyond every rule."""
    assert kappa(1536, 3072) == 2
    learning_rate = scale(rule, replace(ADAM, learning_rate=2e-4), 1536, 3072).learning_rate
    expected = {"none": 2e-4, "linear": 4e-4, "sqrt": 2e-4 * 2**0.5, "beta2_half_life": 2e-4, "conservative": 3e-4}
    assert learning_rate == pytest.approx(expected[rule], rel=1e-12)
    assert learning_rate < 6e-4


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sizes", [(0, 256), (256, 0), (256, -1), (256, 256.0), (True, 256), (256, None), (256, "256")])
def test_a_batch_is_a_whole_number_of_samples(rule, sizes):
    with pytest.raises(UsageError, match=r"batch_size .* must be a whole number of samples"):
        scale(rule, ADAM, *sizes)


def test_both_bad_batches_are_named_at_once():
    with pytest.raises(UsageError) as error:
        scale("linear", ADAM, 0, -8)
    assert [problem.split(" must")[0] for problem in error.value.problems] == [
        "tuned_batch_size 0",
        "global_batch_size -8",
    ]


@pytest.mark.parametrize(
    ("rule", "hint"),
    [
        ("liner", "did you mean linear?"),
        ("beta2_halflife", "did you mean beta2_half_life?"),
        ("cube", "valid names: b"),
    ],
)
@pytest.mark.parametrize("batch", [256, 512])
def test_an_unknown_rule_is_refused_with_the_nearest_name(rule, hint, batch):
    with pytest.raises(UsageError) as error:
        scale(rule, ADAM, 256, batch)
    assert str(error.value).startswith(f"scaling rule {rule!r} is unknown: {hint}")


@pytest.mark.parametrize("rule", [["sqrt"], {"rule": "sqrt"}, None, 3])
def test_a_rule_of_another_kind_is_refused(rule):
    with pytest.raises(UsageError, match=r"^scaling rule .* is unknown: "):
        scale(rule, ADAM, 256, 512)


@pytest.mark.parametrize(
    ("rule", "learning_rate", "batch"),
    [("linear", 1e308, 10**9), ("linear", 0.1, 10**400), ("beta2_half_life", 0.1, 10**400)],
)
def test_a_result_that_no_float_holds_is_refused(rule, learning_rate, batch):
    with pytest.raises(UsageError, match="is too large for a float") as error:
        scale(rule, replace(ADAM, learning_rate=learning_rate), 1, batch)
    assert str(error.value).startswith(f"learning_rate {learning_rate}, scaled by {rule} to global_batch_size, ")


def test_bad_hyperparameters_are_named_at_once():
    with pytest.raises(UsageError) as error:
        Hyperparameters(-0.1, 1.0, math.nan, math.inf, warmup_epochs=-1)
    assert error.value.problems == [
        "learning_rate -0.1 must be a number in [0, inf): correct it.",
        "adam_beta1 1.0 must be a number in [0, 1): correct it.",
        "adam_beta2 nan must be a number in [0, 1): correct it.",
        "adam_epsilon inf must be a number in [0, inf): correct it.",
        "warmup_epochs -1 must be a number in [0, inf): correct it.",
    ]


@pytest.mark.parametrize("name", ["learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon"])
@pytest.mark.parametrize("value", ["1e-4", True])
def test_a_hyperparameter_is_a_number(name, value):
    with pytest.raises(UsageError, match=f"{name} {value!r} must be"):
        replace(ADAM, **{name: value})


def test_rules_of_adam_refuse_an_optimizer_without_its_numbers():
    sgd = Hyperparameters(0.1, None, None, None)
    assert scale("linear", sgd, 256, 1024) == replace(sgd, learning_rate=0.4)
    for rule in ("sqrt", "beta2_half_life"):
        with pytest.raises(UsageError, match=f"scaling rule {rule} changes Adam's numbers"):
            scale(rule, sgd, 256, 1024)
    with pytest.raises(UsageError, match="learning_rate None must be"):
        replace(sgd, learning_rate=None)
