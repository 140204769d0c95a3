"""Samples end to end are computed as transformers computes each of them alone."""

import numpy as np
import pytest
import torch
from common import load_script
from transformers import BertConfig, BertForSequenceClassification

from recipes.attention import Rows, bert_first_tokens, rows_of

SHAPE = {"vocab_size": 50, "hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 20}
CASES = {"ragged": [5, 1, 9, 2], "equal": [4, 4], "one": [7]}


def build(kernel: str | None = None, **changes) -> BertForSequenceClassification:
    torch.manual_seed(0)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**(SHAPE | none | changes), num_labels=3, initializer_range=0.5, max_position_embeddings=16)
    model = BertForSequenceClassification(config).double()
    if kernel is not None:
        model.set_attn_implementation(f"unpadded_{kernel}")
    return model


def cell_of(lengths: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor], dict]:
    """Tokens and kinds of each sample, and the cell of all."""
    rng = torch.Generator().manual_seed(1)
    tokens = [torch.randint(50, (length,), generator=rng) for length in lengths]
    kinds = [(torch.arange(length) >= length // 2).long() for length in lengths]
    starts = np.cumsum(lengths) - lengths
    positions = torch.cat([torch.arange(length) for length in lengths])
    cell = {
        "input_ids": torch.cat(tokens)[None],
        "token_type_ids": torch.cat(kinds)[None],
        "position_ids": positions[None],
        "first_index": torch.from_numpy(starts),
        **rows_of(np.array(lengths)),
    }
    return tokens, kinds, cell


def gradient(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_a_classifier_is_that_of_each_sample_alone(kernel, case, recompute):
    tokens, kinds, cell = cell_of(CASES[case])
    labels = torch.arange(len(tokens)) % 3
    theirs, ours = build(), build(kernel)
    pairs = zip(tokens, kinds, strict=True)
    expected = torch.cat([theirs(of[None], token_type_ids=kind[None]).logits for of, kind in pairs])
    torch.nn.functional.cross_entropy(expected, labels, reduction="sum").backward()
    if recompute:
        ours.gradient_checkpointing_enable()
    sums = load_script("finetune_classifier").ClassificationSums(ours).train()
    loss, _ = sums(**cell, labels=labels)
    loss.sum().backward()
    assert (gradient(ours) - gradient(theirs)).norm() < 1e-12 * gradient(theirs).norm()
    _, logits = sums.eval()(**cell, labels=labels)
    assert torch.allclose(logits, expected, rtol=1e-12)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_all_hidden_states_are_those_of_each_sample_alone(kernel):
    tokens, kinds, cell = cell_of(CASES["ragged"])
    ours, theirs = build(kernel).bert, build().bert
    rows = Rows(len(tokens), cell.pop("source"), cell.pop("place"), cell.pop("is_token"))
    first_index = cell.pop("first_index")
    hidden = ours(**cell, rows=rows).last_hidden_state[0]
    expected = [
        theirs(of[None], token_type_ids=kind[None]).last_hidden_state[0] for of, kind in zip(tokens, kinds, strict=True)
    ]
    assert torch.allclose(hidden, torch.cat(expected), rtol=1e-11)
    assert torch.allclose(
        hidden[first_index], bert_first_tokens(ours, **cell, first_index=first_index, rows=rows), rtol=1e-11
    )


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_dropout_is_at_work_in_training_only(kernel):
    _, _, cell = cell_of(CASES["ragged"])
    model = build(kernel, attention_probs_dropout_prob=0.5)
    sums = load_script("finetune_classifier").ClassificationSums(model)
    labels = torch.zeros(4, dtype=torch.int64)
    first, second = (sums.train()(**cell, labels=labels)[0] for _ in range(2))
    assert first != second
    first, second = (sums.eval()(**cell, labels=labels)[0] for _ in range(2))
    assert first == second


def test_rows():
    rows = rows_of(np.array([1, 3, 2]))
    assert rows["place"].tolist() == [0, 3, 4, 5, 6, 7]
    assert rows["source"].tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 0]
    assert rows["is_token"].squeeze().tolist() == [[True, False, False], [True, True, True], [True, True, False]]
    assert rows_of(np.array([2, 2]))["is_token"] is None
