"""exact(SentenceTransformerTrainer): losses that compare samples, of all samples of a step, however it is cut."""

import pytest
import torch
from cases import keep
from datasets import Dataset, DatasetDict
from run_embedding_trainer import CASES, train, write_texts
from sentence_transformers.sentence_transformer import losses

from samestep.errors import UsageError

ROUNDING = {"guided": 1e-5}
"""Of losses that divide by a small temperature."""


def distance(found, true):
    return max((torch.dist(a, b) / b.norm()).item() for a, b in zip(found, true, strict=True))


@pytest.mark.parametrize("name", keep(CASES, ["negatives", "hard", "matryoshka", "cosent"]))
def test_every_cut_is_the_step_of_one_large_batch(name):
    """The truth is the trainer as it is, with 8 and 3 samples in one micro-batch."""
    true, plain = train(name, 8, 1, is_exact=False)
    logged = [row["loss"] for row in plain.state.log_history if "loss" in row]
    assert len(true) == 2
    for b, k in ((8, 1), (4, 2), (1, 8)):
        found, trainer = train(name, b, k)
        assert distance(found, true) < ROUNDING.get(name, 2e-6), (b, k)
        assert [row["loss"] for row in trainer.state.log_history if "loss" in row] == pytest.approx(logged, rel=1e-3)
    assert distance(train(name, 2, 4, is_exact=False)[0], true) > 0.05


def test_dropout_is_the_same_in_both_forwards():
    """Embeddings with other noise than before would be refused in the first step."""
    true, _ = train("negatives", 8, 1, is_exact=False, dropout=0.2)
    found, _ = train("negatives", 2, 4, dropout=0.2)
    assert distance(found, true) > 0.05  # the cut decides which noise it is, as in the trainer as it is
    assert all(gradient.norm() > 0 for gradient in found)


@pytest.mark.distributed
def test_processes_take_the_same_step(run_processes):
    first, second = run_processes("run_embedding_trainer", 2)
    for name in CASES:
        true, _ = train(name, 8, 1, is_exact=False)
        for found in (first, second):
            assert distance(found[name], true) < ROUNDING.get(name, 2e-6), name


def test_what_is_refused():
    texts = Dataset.from_dict({"a": write_texts(0), "b": write_texts(1)})
    with pytest.raises(UsageError, match="batch_sampler is no_duplicates, must be batch_sampler"):
        train("cached", 2, 2, batch_sampler="no_duplicates")
    with pytest.raises(UsageError, match="train_dataset is several datasets"):
        train("cached", 2, 2, train_dataset=DatasetDict({"x": texts, "y": texts}))


def test_a_loss_that_gathers_is_refused(monkeypatch):
    gathering = (lambda model: losses.MultipleNegativesRankingLoss(model, gather_across_devices=True), 2, None)
    monkeypatch.setitem(CASES, "cached", gathering)
    with pytest.raises(UsageError, match="gather_across_devices is True, must be False"):
        train("cached", 2, 2)
