"""Programs that decide by numbers of their model, and what each micro-batch's model was."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stepaudit.decisions import judge
from stepaudit.explain import find_schedule
from stepaudit.judge import compare
from stepaudit.reads import READS, watch_reads
from stepaudit.record import Recorder
from stepaudit.terms import take_gradients

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = X @ torch.tensor([1.0, -2.0, 0.5, 1.0], dtype=torch.float64)


def run(b: int, change=None, moves: bool = False, limit: float = 0.0, model=None) -> list:
    """Record a loop over steps of 8 samples, in micro-batches of b; one whose loss is below the limit is skipped."""
    torch.manual_seed(0)
    model = model or nn.Linear(4, 1).double()
    optimizer, k = torch.optim.SGD(model.parameters(), lr=0.3), 8 // b
    with Recorder(keep_parameters=not moves) as recorder:
        for number, rows in enumerate(torch.arange(32).split(b)):
            output = model(X[rows])
            loss = F.mse_loss(output[:, 0], Y[rows])
            if loss.item() >= limit:
                (loss / k).backward()
            if change:
                change(model, number)
            if number % k == k - 1:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
    return [recorder.recording]


def name(reference: list, other: list) -> list[str]:
    return [finding.cause for finding in compare(reference, other, 1e-6).findings]


def test_a_program_that_reads_numbers_is_recorded_while_parameters_move():
    """At the first parameters no loss is below the limit; later one is, in small micro-batches."""
    kept, moved = ([m.loss * 4 for s in run(2, moves=moves)[0].steps for m in s.micro_steps] for moves in (False, True))
    limit, asked = (min(kept) + min(moved)) / 2, []
    assert min(moved) < limit < min(kept)
    assert name(run(8, limit=limit), run(2, limit=limit)) == []

    def record_again(is_reference: bool, mode: str) -> list:
        asked.append((is_reference, mode))
        return run(8 if is_reference else 2, moves=True, limit=limit)

    comparison = judge(run(8, limit=limit), run(2, limit=limit), 1e-6, record_again)
    assert asked == [(True, "train"), (False, "train")]
    assert [finding.cause for finding in comparison.findings] == ["dropped"], comparison.findings


@pytest.mark.parametrize(("file", "count"), [("train.py", 1), ("site-packages/library.py", 0)])
def test_only_reads_of_the_program_count_and_nothing_is_left_behind(file, count):
    before, notes = {name: getattr(torch.Tensor, name) for name in READS}, []
    code = "float(loss)\nloss.item()\nbool(loss > 1)\nlabels.item()"
    with watch_reads(lambda name: "site-packages" not in name, lambda: notes.append(file)):
        exec(compile("labels.item()", file, "exec"), {"labels": torch.tensor(3)})
        assert not notes  # whole numbers are data
        exec(compile(code, file, "exec"), {"loss": torch.tensor(2.0), "labels": torch.tensor(3)})
    assert len(notes) == count
    assert {name: getattr(torch.Tensor, name) for name in READS} == before


def test_the_rows_of_a_skipped_micro_batch_are_not_those_of_the_next_one():
    all_steps = [m for step in run(2)[0].steps for m in step.micro_steps]
    losses = sorted(m.loss for m in all_steps)
    steps = run(2, limit=2 * (losses[3] + losses[4]))[0].steps
    kept = [m for step in steps for m in step.micro_steps]
    assert [m.rows for m in kept] == [m.rows for m in all_steps if m.loss > losses[3]]


def shrink(model: nn.Module, number: int) -> None:
    """Shrink the weights after each micro-batch of two rows, and put them back behind the last one of a step."""
    with torch.no_grad():
        model.weight.mul_(0.9 if number % 4 < 3 else 0.9**-3)


def test_parameters_that_change_between_micro_batches_are_another_model():
    (finding,) = compare(run(8), run(2, shrink), 1e-6).findings
    assert finding.cause == "state"
    assert "changed between its micro-batches" in finding.evidence


def test_modes_that_change_with_micro_batches_are_another_model():
    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1 + x[:, :1] ** 2 if self.training else 1)

    def stop(model: nn.Module, number: int) -> None:
        if number == 1:
            model.eval()

    (finding,) = compare(*[run(b, stop, model=_make(Noisy)) for b in (8, 2)], 1e-6).findings
    assert (finding.cause, finding.where) == ("state", "step 1")
    assert "0% or 100% of the modules are in training" in finding.evidence


def _make(kind: type) -> nn.Module:
    torch.manual_seed(0)
    return kind(4, 1).double()


def test_terms_that_are_computed_from_each_other_are_one_term():
    """The gradient of the inner one would count twice."""
    w = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    inner = torch.sin(w)
    loss = (w.square().sum() + 3 * (inner + torch.exp(inner)).mean()) / 2
    gradients, factors = take_gradients(loss, [w], torch.autograd.grad)
    assert factors == pytest.approx([1.0, 1.5])
    whole = torch.autograd.grad(loss, [w])[0]
    torch.testing.assert_close(sum(term[0] for term in gradients), whole)


@pytest.mark.parametrize(("weights", "is_named"), [([0.0, 0.1, 0.2, 0.3], True), ([0.1, 0.3, 0.2, 0.3], False)])
def test_a_term_whose_number_grows_with_micro_batches_has_a_schedule(weights, is_named):
    factors = [[0.25, weight / 4] for weight in weights]
    columns = [np.ones((4, 3)), np.ones((4, 3)) * np.array(weights)[:, None]]
    numbers = np.array([0] * 4 + [1] * sum(weight > 0 for weight in weights))
    true = np.array([1.0] * 4 + [0.15 / weight for weight in weights if weight])
    assert (find_schedule(factors, numbers, columns, true, "step 1") is not None) == is_named
