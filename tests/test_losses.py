"""Sums, never means."""

import pytest
import torch
import torch.nn.functional as F
from compare import BF16

from samestep.step.losses import IGNORED, cross_entropy_sum, linear_cross_entropy, num_correct, weighted_loss


def test_the_sum_over_any_cut_is_the_sum_over_the_whole():
    torch.manual_seed(0)
    logits, labels = torch.randn(20, 7, dtype=torch.float64), torch.randint(7, (20,))
    labels[3] = IGNORED
    whole = cross_entropy_sum(logits, labels)
    parts = sum(cross_entropy_sum(logits[rows], labels[rows]) for rows in (slice(0, 1), slice(1, 13), slice(13, 20)))
    assert parts.item() == pytest.approx(whole.item(), rel=1e-14)
    assert whole.item() / 19 == pytest.approx(F.cross_entropy(logits, labels, ignore_index=IGNORED).item())
    assert num_correct(logits, logits.argmax(-1)) == 20


def test_nothing_to_predict_is_zero_with_a_gradient():
    for labels in (torch.zeros(0, dtype=torch.int64), torch.full((3,), IGNORED)):
        logits = torch.randn(len(labels), 7, requires_grad=True)
        loss = cross_entropy_sum(logits, labels)
        loss.backward()
        assert loss.item() == 0
        assert logits.grad is not None
        assert not logits.grad.any()


def test_half_precision_is_summed_in_float32():
    logits = torch.zeros(70_000, 2, dtype=torch.float16)  # 48,520 nats, beyond what bf16 counts and near fp16's end
    loss = cross_entropy_sum(logits, torch.zeros(70_000, dtype=torch.int64))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(70_000 * 0.693147, rel=1e-4)
    assert cross_entropy_sum(logits.double(), torch.zeros(70_000, dtype=torch.int64)).dtype == torch.float64


def test_the_weighted_loss_of_micro_batches_adds_up():
    weights, counts = torch.tensor([1.0, 0.5]), torch.tensor([10, 4])
    micro_batches = torch.tensor([[5.0, 1.0], [7.0, 2.0], [0.0, 0.0]])
    parts = sum(weighted_loss(micro_batch, counts, weights) for micro_batch in micro_batches)
    assert parts.item() == pytest.approx(12 / 10 + 0.5 * 3 / 4)
    assert weighted_loss(micro_batches.sum(0), counts, weights).item() == pytest.approx(parts.item())


def problem(rows: int, classes: int, dtype=torch.float64, seed: int = 0):
    torch.manual_seed(seed)
    hidden = torch.randn(rows, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(classes, 16, dtype=dtype, requires_grad=True)
    labels = torch.randint(classes, (rows,))
    return hidden, weight, labels


@pytest.mark.parametrize("max_logits", [10**6, 31 * 12, 31, 1])
def test_in_chunks_the_loss_and_both_gradients_are_the_same(max_logits):
    hidden, weight, labels = problem(37, 31)
    labels[[0, 20, 36]] = IGNORED
    whole = cross_entropy_sum(hidden @ weight.T, labels)
    true = torch.autograd.grad(0.3 * whole, (hidden, weight))
    total, correct = linear_cross_entropy(hidden, weight, labels, max_logits)
    assert total.item() == pytest.approx(whole.item(), rel=1e-14)
    assert correct == 0, "not counted while a gradient is recorded"
    for ours, theirs in zip(torch.autograd.grad(0.3 * total, (hidden, weight)), true, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        evaluated, correct = linear_cross_entropy(hidden, weight, labels, max_logits)
        assert evaluated == total
        assert correct == num_correct(hidden @ weight.T, labels) > 0


def test_nothing_to_predict_in_chunks():
    hidden, weight, labels = problem(0, 7)
    total, _ = linear_cross_entropy(hidden, weight, labels)
    total.backward()
    assert total.item() == 0
    assert hidden.grad.shape == (0, 16)
    assert not weight.grad.any()


@pytest.mark.parametrize("max_logits", [10**6, 500])
def test_chunks_under_autocast_are_as_near_as_their_format(max_logits):
    hidden, weight, labels = problem(64, 50, torch.float32)
    exact = torch.autograd.grad(cross_entropy_sum(hidden @ weight.T, labels), (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = linear_cross_entropy(hidden, weight, labels, max_logits)
    ours = torch.autograd.grad(total, (hidden, weight))
    assert total.dtype == ours[0].dtype == ours[1].dtype == torch.float32
    for name in (0, 1):
        miss = (ours[name] - exact[name]).norm() / exact[name].norm()
        assert BF16 / 8 < miss < 4 * BF16


def test_weights_kept_in_half_precision():
    hidden, weight, labels = problem(64, 50, torch.bfloat16)
    total, _ = linear_cross_entropy(hidden, weight, labels, 500)
    total.backward()
    assert total.dtype == torch.float32
    assert weight.grad.dtype == hidden.grad.dtype == torch.bfloat16


def test_a_second_backward_is_refused_not_wrong():
    hidden, weight, labels = problem(5, 7)
    total, _ = linear_cross_entropy(hidden, weight, labels)
    total.backward(retain_graph=True)
    with pytest.raises(AttributeError):
        total.backward()


def test_smoothed_labels_add_up_over_micro_batches():
    """(1 - a) * -log p of the label + a / classes * the sum of -log p of all (Szegedy et al. 2016, section 7)."""
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 5, dtype=torch.float64), torch.tensor([0, 4, 2, -100, 1, 1])
    log_p, counted = logits.log_softmax(-1), labels >= 0
    expected = -(0.7 * log_p[counted, labels[counted]] + 0.3 / 5 * log_p[counted].sum(-1)).sum()
    assert cross_entropy_sum(logits, labels, 0.3).item() == pytest.approx(expected.item(), rel=1e-12)
    parts = [cross_entropy_sum(logits[part], labels[part], 0.3) for part in (slice(2), slice(2, 6), slice(6, 6))]
    assert sum(parts).item() == pytest.approx(expected.item(), rel=1e-12)
