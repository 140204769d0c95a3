"""Exact sums of gradients: no order and no cut changes a bit, and the sum is right."""

import math

import pytest
import torch
from torch import nn

from samestep.errors import UsageError
from samestep.step import exact_sum
from samestep.step.exact_sum import HEADROOM, NOT_FINITE, SLACK, ExactSum, add_exactly


class Vector(nn.Module):
    def __init__(self, size: int = 2**12):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))


def add(gradients: list[torch.Tensor], exponent: int, num_micro_batches: int | None = None) -> ExactSum:
    """Begin a step whose last exponent was `exponent`, and add the gradients up."""
    total = ExactSum(Vector(len(gradients[0])))
    total.last_exponent = exponent
    total.begin(num_micro_batches or len(gradients))
    for gradient in gradients:
        (total.parameters[0] * gradient).sum().backward()
    return total


def draw(kind: str, number: int, size: int = 2**12) -> list[torch.Tensor]:
    """Draw gradients below 2^0, of magnitudes between 1 and 2^-60."""
    generator = torch.Generator().manual_seed(7)
    values = torch.rand(number, size, generator=generator) - 0.5
    values *= 2.0 ** -torch.randint(60, (number, size), generator=generator)
    if kind == "bf16":
        values = values.bfloat16().float()
    if kind == "powers":  # of which many lie half-way between two multiples of the quantum
        values = values.sign() * 2.0 ** -torch.randint(1, 45, (number, size), generator=generator)
    return list(values)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "powers"])
def test_no_order_and_no_cut_changes_a_bit(kind):
    gradients = draw(kind, 12)
    expected = add(gradients, 0)
    expected.finish()
    for seed in range(5):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed)).tolist()
        shuffled = [gradients[place] for place in order]
        parts = [add(shuffled[first : first + 1 + seed], 0, 12) for first in range(0, 12, 1 + seed)]
        total = sum(part.flat - exact_sum.OFFSET * part.quantum for part in parts)
        assert torch.equal(total, expected.flat)
    sums = torch.stack(gradients).double().sum(0)
    assert torch.equal(expected.parameters[0].grad, expected.flat.float())
    error = (expected.flat - sums).abs()
    assert bool((error <= 12 * expected.quantum / 2 + 1e-13 * sums.abs()).all())


def test_ties_need_the_factor(monkeypatch):
    """Were it not so, the factor could go."""
    monkeypatch.setattr(exact_sum, "FACTOR", 1.0)
    gradients = draw("powers", 12)
    assert not torch.equal(add(gradients, 0).flat, add(gradients[::-1], 0).flat)


def test_sums_are_exact_at_the_largest_gradients():
    """All of a step's micro-batches at the limit, of one sign, and all but the smallest number."""
    for number in (1, 3, 300):
        small = torch.full((4,), 2.0**-30)
        gradients = [torch.full((4,), 2.0**HEADROOM * (1 - 2**-24))] * (number - 1) + [small]
        totals = [add(order, 0) for order in (gradients, gradients[::-1])]
        assert torch.equal(totals[0].flat, totals[1].flat)
        totals[0].finish()
        expected = sum(gradient.double() for gradient in gradients)
        assert (totals[0].flat - expected).abs().max() <= number * totals[0].quantum + 1e-13 * expected.max()


@pytest.mark.parametrize(
    ("largest", "exponent", "suits"),
    [
        (1.0, 1, True),
        (0.99, 0, True),
        (2.0**HEADROOM * 0.99, HEADROOM, True),
        (2.0**HEADROOM, HEADROOM + 1, False),
        (2.0**-SLACK * 0.99, -SLACK, True),
        (2.0**-SLACK * 0.49, -SLACK - 1, False),
        (0.0, -NOT_FINITE, True),
        (math.inf, NOT_FINITE, True),
        (math.nan, NOT_FINITE, True),
    ],
)
def test_when_a_step_begins_again(largest, exponent, suits):
    gradient = torch.zeros(10)
    gradient[3] = -largest
    total = add([gradient], 0)
    assert total.exponent() == exponent
    assert total.fits(exponent) == suits
    total.begin(1)
    assert total.fits(exponent)  # at the second try, if not at the first
    assert (total.last_exponent == exponent) == (abs(exponent) != NOT_FINITE)


def test_gradients_are_taken_and_given(monkeypatch):
    model = nn.Sequential(nn.Linear(3, 2), nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last))
    model[0].bias.requires_grad_(False)
    total = ExactSum(model)
    total.begin(2)
    x = torch.rand(4, 3)
    for part in (x[:2], x[2:]):
        model[0](part).sum().backward()
        assert model[0].weight.grad is None
    total.finish()
    torch.testing.assert_close(model[0].weight.grad, x.sum(0).expand(2, 3))
    assert model[0].bias.grad is None
    assert model[1].weight.grad.stride() == model[1].weight.stride()
    assert not model[1].weight.grad.any()
    with pytest.raises(UsageError, match=r"torch\.float64"):
        ExactSum(nn.Linear(2, 2).double())


def test_sums_are_exact_and_numbers_that_are_not_finite_pass_through():
    assert add_exactly([1e16, 1.0, -1e16]) == 1.0
    assert add_exactly([1.0, math.inf]) == math.inf
    assert math.isnan(add_exactly([math.inf, 1.0, -math.inf]))
    assert math.isnan(add_exactly([math.nan, math.inf]))
