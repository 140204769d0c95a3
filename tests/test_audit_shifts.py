"""The audit names targets that are shifted twice, or not at all, by whatever shifts them; and none that are shifted once."""

import sys

import pytest
import torch
import torch.nn.functional as F
from common import ROOT
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from stepaudit.judge import find_faults
from stepaudit.record import Recorder

sys.path.append(str(ROOT / "tests" / "audited"))
import shifted

BEHIND, READS = (
    "each place is trained on the token behind the next one",
    "each place is trained on the token that it reads",
)
TOKENS = torch.tensor([[5, 6, 7, 8, 2, 9], [5, 8, 9, 3, 6, 7]])


def find_shift(step, model) -> str:
    """Take two steps of two micro-batches, and return what the audit says of their targets; empty: nothing."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder() as recorder:
        for _ in range(2):
            step().backward()
            step().backward()
            optimizer.step()
            optimizer.zero_grad()
    return "".join(f.evidence for f in find_faults([recorder.recording]) if f.cause == "label_shift")


@pytest.mark.parametrize("way", shifted.CASES, ids=lambda way: way.__name__)
def test_a_decoder_behind_an_encoder(way):
    torch.manual_seed(0)
    make, tokens = shifted.CASES[way]
    model = make().double()
    batch = shifted.collate(list(shifted.draw_pairs(4, make is shifted.whisper)), **tokens)
    text = find_shift(lambda: way(model, dict(batch)), model)
    assert text == ("" if way.__name__ not in shifted.WRONG else READS if "not_shifted" in way.__name__ else BEHIND)


@pytest.mark.parametrize(("shifts", "text"), [(True, BEHIND), (False, "")])
def test_a_smoothed_loss_whose_labels_are_padded_otherwise_than_inputs(shifts, text):
    """transformers' picks log-probabilities of token 0 where nothing counts; BART pads by 1."""
    torch.manual_seed(0)
    model = shifted.bart().double()
    batch = shifted.collate(list(shifted.draw_pairs(4, False)))
    inputs = shifted.shift_tokens_right(batch["labels"], 1, shifted.EOS)

    def step():
        output = model(input_ids=batch["input_ids"], decoder_input_ids=inputs)
        return shifted.LabelSmoother(0.1)(output, batch["labels"], shift_labels=shifts)

    assert find_shift(step, model) == text


def give_both(model, labels):
    """Give a model labels for a loss that is not used, and compute another one."""
    logits = model(input_ids=TOKENS, labels=labels).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


def ignore_zero(model):
    labels = TOKENS.roll(-2, 1).index_fill(1, torch.tensor([2]), 0)
    return F.cross_entropy(model(input_ids=TOKENS).logits.flatten(0, 1), labels.flatten(), ignore_index=0)


WAYS = {
    "the model shifts": (lambda model: model(input_ids=TOKENS, labels=TOKENS).loss, ""),
    "the data shift, and the model": (lambda model: model(input_ids=TOKENS, labels=TOKENS.roll(-1, 1)).loss, BEHIND),
    "nobody shifts": (
        lambda model: F.cross_entropy(model(input_ids=TOKENS).logits.flatten(0, 1), TOKENS.flatten()),
        READS,
    ),
    "the loss shifts, labels of two dimensions": (
        lambda model: F.cross_entropy(model(input_ids=TOKENS).logits[:, :-1].transpose(1, 2), TOKENS[:, 1:]),
        "",
    ),
    "the loss shifts by two": (
        lambda model: F.cross_entropy(
            model(input_ids=TOKENS).logits[:, :-1].transpose(1, 2), TOKENS.roll(-1, 1)[:, 1:]
        ),
        BEHIND,
    ),
    "the model's loss of shifted labels is not used": (lambda model: give_both(model, TOKENS.roll(-1, 1)), ""),
    "the data shift by two, and another index is ignored": (ignore_zero, BEHIND),
    "chosen logits": (
        lambda model: F.cross_entropy(model(input_ids=TOKENS).logits[TOKENS > 5], TOKENS[TOKENS > 5]),
        "",  # which places they are is unknown
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_decoder_alone(way):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=2, n_positions=8))
    step, text = WAYS[way]
    assert find_shift(lambda: step(model), model) == text


def test_a_model_that_reads_what_it_writes_is_no_decoder():
    """An autoencoder of tokens."""

    class Autoencoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10))

        def forward(self, input_ids):
            return self.layers(input_ids)

    model = Autoencoder()
    assert not find_shift(lambda: F.cross_entropy(model(input_ids=TOKENS).flatten(0, 1), TOKENS.flatten()), model)
