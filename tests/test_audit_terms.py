"""Losses of several terms are split, and gradients that a program assigns are seen, without a change of the program."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stepaudit.assignments import watch_assignments
from stepaudit.averages import Averages
from stepaudit.judge import compare
from stepaudit.precision import compute_in_float32, note_autocast
from stepaudit.record import Recorder
from stepaudit.terms import MAX_TERMS, take_gradients

X = torch.randn(16, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def make_loss(kind: str) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Make a loss, the parameters that it depends on, and its number of terms."""
    w, s = (
        torch.ones(5, dtype=torch.float64, requires_grad=True),
        torch.zeros(2, dtype=torch.float64, requires_grad=True),
    )
    fit, size = (X @ w).square().mean(), w.norm()
    losses = {
        "sum": (fit / 4 + 0.1 * size, 2),
        "stack": (torch.stack([fit, size, (X @ w).tanh().sum()]).mean(), 3),
        "list": (sum([fit, size, -(X @ w).square().sum().sqrt()]), 3),
        "parameter": ((torch.exp(-s) * torch.stack([fit, size]) + s).sum(), 2),
        "one": (fit / 4, 1),
        "product": (fit * size, 1),
        "many": (torch.stack([(X @ w).pow(n).mean() for n in range(2, MAX_TERMS + 3)]).sum(), MAX_TERMS + 1),
    }
    return losses[kind][0], [w, s], losses[kind][1]


@pytest.mark.parametrize("kind", ["sum", "stack", "list", "parameter", "one", "product", "many"])
def test_the_gradients_of_the_terms_add_up(kind):
    """The graph is left as it is: the program's own backward comes after."""
    loss, parameters, number = make_loss(kind)
    answer = take_gradients(loss, parameters, torch.autograd.grad)
    whole = torch.autograd.grad(loss, parameters, allow_unused=True)
    if not 1 < number <= MAX_TERMS:
        assert answer is None
        return
    terms, factors = answer
    assert len(terms) == len(factors) == number
    for gradient, *parts in zip(whole, *terms, strict=True):
        known = [part for part in parts if part is not None]
        assert bool(known) == (gradient is not None)
        assert not known or torch.allclose(sum(known), gradient, rtol=1e-12)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 1)).double()


def record(train, k: int, make=make_model) -> list:
    torch.manual_seed(0)
    model = make()
    with Recorder() as recorder:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), k)
    return [recorder.recording]


def causes(train, k: int = 4) -> list[str]:
    return [f.cause for f in compare(record(train, 1), record(train, k), 1e-7).findings]


def step(model, optimizer, k, loss_of) -> None:
    for part in X.chunk(k):
        loss_of(model, part).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_term_without_samples_counts_once_per_micro_batch():
    at_zero = torch.zeros(1, 5, dtype=torch.float64)

    def train(model, optimizer, k, times):
        step(model, optimizer, k, lambda m, x: m(x).tanh().mean() / k + m(at_zero).square().sum() / (1 if times else k))

    assert causes(lambda *a: train(*a, True)) == ["penalty"]
    assert causes(lambda *a: train(*a, False)) == []


def test_each_term_has_a_denominator():
    """Positive and negative samples have means of their own, and are unevenly dealt out."""

    def train(model, optimizer, k, is_exact):
        counts = [(X[:, 0] > 0).sum(), (X[:, 0] <= 0).sum()]

        def loss_of(model, x):
            own = [(x[:, 0] > 0).sum().clamp(min=1) * k, (x[:, 0] <= 0).sum().clamp(min=1) * k]
            sums = [m.sum() for m in (model(x[x[:, 0] > 0]).square(), model(x[x[:, 0] <= 0]).tanh())]
            return sum(s / n for s, n in zip(sums, counts if is_exact else own, strict=True))

        step(model, optimizer, k, loss_of)

    assert causes(lambda *a: train(*a, False)) == ["mean_of_means"]
    assert causes(lambda *a: train(*a, True)) == []


def test_one_term_is_not_divided():
    def train(model, optimizer, k):
        step(model, optimizer, k, lambda m, x: m(x).square().mean() / k + m(x).tanh().mean())

    recordings = record(train, 1), record(train, 4)
    (finding,) = compare(*recordings, 1e-7).findings
    assert (finding.cause, "term" in finding.evidence, "4 = k times" in finding.evidence) == ("factor", True, True)


def test_earlier_micro_batches_are_computed_again():
    def train(model, optimizer, k):
        total = torch.zeros(())
        for x in X.chunk(k):
            total = total + model(x).square().mean() / k
            total.backward(retain_graph=True)
        optimizer.step()

    assert causes(train) == ["counted_again"]


@pytest.mark.parametrize(("keeps", "expected"), [(False, ["emptied_between"]), (True, [])])
def test_gradients_that_are_assigned(keeps, expected):
    """As with torch.func, where no backward is called."""

    def train(model, optimizer, k):
        for _ in range(2):
            for x in X.chunk(k):
                weights = dict(model.named_parameters())
                gradients = torch.func.grad(
                    lambda w, x: torch.func.functional_call(model, w, (x,)).square().mean() / k
                )(weights, x)
                for name, p in weights.items():
                    p.grad = gradients[name].detach() + (p.grad if keeps and p.grad is not None else 0)
            optimizer.step()
            optimizer.zero_grad()

    assert causes(train) == expected


def test_assignments_are_told_and_the_property_is_given_back():
    p, told = torch.ones(2, requires_grad=True), []
    with watch_assignments(lambda t: told.append(t.grad), lambda t: told.append(t.grad)):
        p.grad = torch.ones(2)
        p.grad = None
    assert told[0] is None
    assert told[1].tolist() == [1, 1]
    assert len(told) == 2
    assert p.grad is None
    assert "grad" not in vars(torch.Tensor)


def test_one_number_is_a_multiple_of_anything_and_no_penalty():
    """A temperature whose gradient comes k times; all other parameters are right."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.scale = nn.Linear(5, 3).double(), nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, x):
            return self.scale * self.body(x)

    def train(model, optimizer, k):
        step(model, optimizer, k, lambda m, x: (m.scale.detach() * m.body(x)).square().mean() / k)
        step(
            model,
            optimizer,
            k,
            lambda m, x: (m(x).square().mean() + (k - 1) * (m.scale * m.body(x).detach()).square().mean()) / k,
        )

    findings = compare(record(train, 1, Scaled), record(train, 4, Scaled), 1e-7).findings
    assert [(f.cause, f.where, f.evidence[:5]) for f in findings] == [("factor", "scale, step 2", "4 = k")]


def test_averages_of_parts_of_a_model_are_followed():
    body = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    teacher, other = nn.Linear(5, 3), nn.Linear(7, 7)
    averages = Averages()
    averages.find(body)
    assert [[tuple(p.shape) for p in module] for module in averages.modules] == [[(3, 5), (3,)]]
    assert not averages.have_changed()
    before = averages.sketch()
    with torch.no_grad():
        teacher.weight.add_(1)
    assert averages.have_changed()
    assert (averages.sketch() != before).any()
    averages.leave_out(teacher.parameters())  # an optimizer has them
    assert averages.modules == []
    assert other.weight.shape == (7, 7)


def test_16_bits_are_noted_and_computed_in_32():
    noted: list[str] = []
    linear, x = nn.Linear(5, 3), X.float()
    with note_autocast(noted.append), torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x).dtype == torch.bfloat16
    with note_autocast(noted.append), torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        linear(x)
    assert noted == ["bfloat16"]
    with compute_in_float32():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert linear(x).dtype == torch.float32
        assert nn.Linear(5, 3).to(torch.bfloat16).weight.dtype == torch.float32
        assert nn.Linear(5, 3).half().weight.dtype == x.half().dtype == torch.zeros(2, dtype=torch.float16).dtype
        assert x.bfloat16().dtype == torch.float32
        assert X.to(torch.float64).dtype == torch.float64
    assert x.half().dtype == torch.float16
    assert F.relu(x.bfloat16()).dtype == torch.bfloat16
