"""Sums, never means."""

import pytest
import torch
import torch.nn.functional as F

from recipes.losses import IGNORED, cross_entropy_sum, num_correct, weighted_loss


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


def test_the_weighted_loss_of_cells_adds_up():
    weights, counts = torch.tensor([1.0, 0.5]), torch.tensor([10, 4])
    cells = torch.tensor([[5.0, 1.0], [7.0, 2.0], [0.0, 0.0]])
    parts = sum(weighted_loss(cell, counts, weights) for cell in cells)
    assert parts.item() == pytest.approx(12 / 10 + 0.5 * 3 / 4)
    assert weighted_loss(cells.sum(0), counts, weights).item() == pytest.approx(parts.item())
