"""`report_mask` says which tokens are trained; the audit says so of a program whose labels teach nothing, or no stop."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from stepaudit import report_mask
from stepaudit.errors import UsageError
from stepaudit.judge import compare, find_faults
from stepaudit.masks import find_shift
from stepaudit.record import Recorder

PAD, STOP = 0, 1
INPUT_IDS = torch.tensor([[5, 6, 7, STOP, PAD], [5, 8, 9, 9, STOP], [6, 7, STOP, PAD, PAD]])


class Tokenizer:
    eos_token_id, pad_token_id = STOP, PAD

    def decode(self, ids):
        return " ".join(map(str, ids))


def make_labels(*masks: str) -> torch.Tensor:
    """Make labels of INPUT_IDS: x where a token is trained."""
    return INPUT_IDS.where(torch.tensor([[sign == "x" for sign in mask] for mask in masks]), -100)


def test_a_sound_mask():
    report = report_mask(INPUT_IDS, make_labels("..xx.", "..xxx", ".xx.."), Tokenizer())
    assert (report.num_tokens, report.num_trained) == ([4, 5, 3], [2, 3, 2])
    assert report.share == 7 / 12
    assert report.stops == [True] * 3
    assert not report.findings
    first, *texts = str(report).splitlines()
    assert first == "7 of 12 tokens are trained (58%), in 3 of 3 samples; 3 train a token that ends the text"
    assert texts == ["  5 6 [7 1]", "  5 8 [9 9 1]", "  6 [7 1]"]


def test_samples_without_a_label_are_named():
    """The first token of a row has no place in front of it that could predict it."""
    report = report_mask(INPUT_IDS, make_labels("x....", "..xxx", "....."), Tokenizer())
    assert report.untrained_samples == [0, 2]
    (finding,) = report.findings
    assert (finding.cause, finding.where, finding.evidence) == ("no_targets", "rows 0, 2", "2 of 3 samples")
    assert "generation" in finding.remedy


def test_a_stop_token_that_is_never_trained_is_named():
    """As where the pad token is the stop token, and a collator masks all that is padding."""
    tokenizer = SimpleNamespace(eos_token_id=[STOP, 99], pad_token_id=STOP)
    report = report_mask(INPUT_IDS, make_labels(".xx..", ".xxx.", "x...."), tokenizer)
    assert [finding.cause for finding in report.findings] == ["no_targets", "untrained_stop"]
    assert report.findings[1].evidence == "in 3 of 3 samples, and a label in none"
    assert report.texts == []


def test_labels_that_stand_for_pictures_are_named():
    tokenizer = SimpleNamespace(eos_token_id=STOP, image_token_id=9)
    (finding,) = report_mask(INPUT_IDS, make_labels("..xx.", "..xxx", ".xx.."), tokenizer).findings
    assert (finding.cause, finding.evidence) == ("media_tokens", "2 of 7 trained tokens")


@pytest.mark.parametrize(
    ("places", "is_shifted", "text"),
    [
        (0, False, ""),
        (1, False, "each place is trained on the token behind the next one"),
        (-1, False, "each place is trained on the token that it reads"),
        (2, False, ""),
        (1, True, ""),
        (2, True, "each place is trained on the token behind the next one"),
        (0, True, "each place is trained on the token that it reads"),
    ],
)
def test_labels_at_other_places_are_named(places, is_shifted, text):
    """Labels are the inputs so many places behind them; the first one is not trained."""
    inputs = torch.tensor([[5, 6, 7, 8, 9, 4], [3, 8, 2, 6, 5, 7]])
    labels = inputs.roll(-places, 1)
    labels[:, 0] = -100
    assert find_shift(inputs, labels, is_shifted) == text
    if not is_shifted:
        report = report_mask(inputs, labels, SimpleNamespace(eos_token_id=7))
        assert [finding.evidence for finding in report.findings if finding.cause == "label_shift"] == [text][
            : len(text)
        ]


def test_bad_input_gets_one_line():
    with pytest.raises(UsageError, match=r"both must be \[samples, length\]"):
        report_mask(INPUT_IDS, INPUT_IDS[:, 1:], Tokenizer())
    with pytest.raises(UsageError, match="eos_token_id is None"):
        report_mask(INPUT_IDS, INPUT_IDS, SimpleNamespace(eos_token_id=None))


@pytest.mark.parametrize(
    ("masks", "causes"),
    [
        (("..xx.", "..xxx", ".xx.."), []),
        (("..x..", "..xx.", ".x..."), ["untrained_stop"]),
        (("x....", ".....", "....."), ["no_targets", "untrained_stop"]),
    ],
)
def test_the_audit_says_so_of_a_program(masks, causes):
    """The verdict stays: a wrong mask is the same on every layout."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=2, eos_token_id=STOP, n_positions=8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder() as recorder:
        for _ in range(2):
            loss = model(input_ids=INPUT_IDS, labels=make_labels(*masks)).loss
            loss.nan_to_num().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [finding.cause for finding in find_faults([recorder.recording])] == causes
    if "no_targets" not in causes:
        assert compare([recorder.recording], [recorder.recording], 1e-7).is_exact
