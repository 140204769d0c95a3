"""Samples end to end are computed as transformers computes each of them alone."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from samestep.data.ragged import Rows, make_micro_batch, make_rows
from samestep.models import attention
from samestep.models.attention import last_hidden_at
from samestep.models.text_classification import ClassificationSums

SHAPE = {"vocab_size": 50, "hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 20}
CASES = {
    "ragged": [5, 1, 9, 2],
    "equal": [4, 4],
    "one": [7],
    "many": [16] * 3 + [15] * 6 + [9] * 11 + [3, 3, 2],  # more of everything than is needed: sizes are rounded
}
pytestmark = pytest.mark.usefixtures("tables_cost_nothing")
TABLED = [kernel for kernel in attention.KERNELS if kernel != "varlen"]


def build(kernel: str | None = None, **changes) -> BertForSequenceClassification:
    torch.manual_seed(0)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**(SHAPE | none | changes), num_labels=3, initializer_range=0.5, max_position_embeddings=16)
    model = BertForSequenceClassification(config).double()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    if kernel is not None:
        attention.unpad(model, kernel)
    return model


def make_samples(lengths: list[int], queries: str) -> tuple[list[torch.Tensor], list[torch.Tensor], list, dict]:
    """Tokens, kinds and queries of each sample, and the micro-batch of all."""
    rng = np.random.default_rng(1)
    tokens = [rng.integers(50, size=length) for length in lengths]
    halves = [length // 2 for length in lengths]
    kinds = [(torch.arange(length) >= half).long() for length, half in zip(lengths, halves, strict=True)]
    places = {
        "first": [np.zeros(1, int) for _ in lengths],
        "some": [np.sort(rng.permutation(length)[: length // 2 + 1]) for length in lengths],
        "uneven": [np.arange(1 + number % length) for number, length in enumerate(lengths)],
        "all": [np.arange(length) for length in lengths],
    }[queries]
    return list(map(torch.from_numpy, tokens)), kinds, places, make_micro_batch(tokens, halves, places)


def gradient(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", TABLED)
def test_a_classifier_is_that_of_each_sample_alone(kernel, case, recompute):
    tokens, kinds, _, micro_batch = make_samples(CASES[case], "first")
    labels = torch.arange(len(tokens)) % 3
    theirs, ours = build(), build(kernel)
    pairs = zip(tokens, kinds, strict=True)
    expected = torch.cat([theirs(sample[None], token_type_ids=kind[None]).logits for sample, kind in pairs])
    torch.nn.functional.cross_entropy(expected, labels, reduction="sum").backward()
    if recompute:
        ours.gradient_checkpointing_enable()
    sums = ClassificationSums(ours).train()
    loss, _ = sums(**micro_batch, labels=labels)
    loss.sum().backward()
    assert (gradient(ours) - gradient(theirs)).norm() < 1e-12 * gradient(theirs).norm()
    _, logits = sums.eval()(**micro_batch, labels=labels)
    assert torch.allclose(logits, expected, rtol=1e-12)


@pytest.mark.parametrize("case", ["ragged", "equal", "many"])
@pytest.mark.parametrize("queries", ["first", "some", "uneven", "all"])
@pytest.mark.parametrize("kernel", attention.KERNELS)
def test_queries_are_those_of_each_sample_alone(kernel, queries, case, varlen_on_cpus):
    tokens, kinds, places, micro_batch = make_samples(CASES[case], queries)
    ours, theirs = build(kernel).bert, build().bert
    hidden = last_hidden_at(ours, **micro_batch)
    expected = torch.cat(
        [
            theirs(sample[None], token_type_ids=kind[None]).last_hidden_state[0][place]
            for sample, kind, place in zip(tokens, kinds, places, strict=True)
        ]
    )
    assert torch.allclose(hidden[: len(expected)], expected, rtol=1e-11)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (hidden[: len(expected)] * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if not name.startswith("pooler"):
            assert (parameter.grad - other.grad).norm() < 1e-12 * gradient_norm(theirs), name


def gradient_norm(model) -> torch.Tensor:
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_dropout_is_at_work_in_training_only(kernel):
    *_, micro_batch = make_samples(CASES["ragged"], "first")
    model = build(attention_probs_dropout_prob=0.5)
    sums = ClassificationSums(model)
    labels = torch.zeros(4, dtype=torch.int64)
    first, second = (sums.train()(**micro_batch, labels=labels)[0] for _ in range(2))
    assert first != second
    first, second = (sums.eval()(**micro_batch, labels=labels)[0] for _ in range(2))
    assert first == second


@pytest.mark.parametrize("case", CASES)
def test_one_query_per_sample_without_keys_and_values_has_the_same_dropout(case):
    *_, micro_batch = make_samples(CASES[case], "first")
    token_tables, query_tables = (
        attention.make_tables([Rows(*(micro_batch[prefix + name] for name in ("ends", "source", "place")), mask)], 1)
        for prefix, mask in (("", micro_batch["is_token"]), ("query_", None))
    )
    model = build("eager", attention_probs_dropout_prob=0.5).train()
    layer = model.bert.encoder.layer[-1]
    results = []
    for is_alone in (False, True):
        torch.manual_seed(3)
        hidden = torch.randn(
            1, micro_batch["input_ids"].shape[1], SHAPE["hidden_size"], dtype=torch.float64, requires_grad=True
        )
        tables = {"token_tables": token_tables, "query_tables": query_tables}
        y = layer(hidden, queries=micro_batch["queries"], **tables, is_alone=is_alone)[0, : len(CASES[case])]
        y.sin().sum().backward()
        results.append([y, hidden.grad, gradient(layer)])
        key_bias_gradient = layer.attention.self.key.bias.grad
        model.zero_grad()
    for usual, alone in zip(*results, strict=True):
        assert torch.allclose(usual, alone, rtol=1e-11, atol=1e-13)
    assert not key_bias_gradient.any(), "exactly 0, and not None: an optimizer, and a reduction, need it"


def test_rows():
    rows = make_rows(np.array([1, 3, 2]))
    assert rows.ends.tolist() == [0, 1, 4, 6]
    assert rows.place.tolist() == [0, 3, 4, 5, 6, 7]
    assert rows.source.tolist() == [[0, 6, 6], [1, 2, 3], [4, 5, 6]], "padding holds what is behind the samples"
    assert rows.is_token.squeeze().tolist() == [[True, False, False], [True, True, True], [True, True, False]]
    assert make_rows(np.array([2, 2])).is_token is None


def test_tables_have_few_sizes():
    """And a row that no sample is in does not attend to nothing, which has no softmax."""
    rows = make_rows(np.array([17] * 8 + [1]))
    assert rows.source.shape == (10, 18)
    assert rows.place.tolist() == [*(18 * row + place for row in range(8) for place in range(17)), 18 * 8]
    assert rows.is_token.sum((1, 2, 3)).tolist() == [17] * 8 + [1, 1]
    sizes = {make_rows(np.full(number, length)).source.shape for number in range(1, 33) for length in range(64, 129)}
    assert len(sizes) == 16 * 9
