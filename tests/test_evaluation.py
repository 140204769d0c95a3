"""Evaluations: the same to the bit for any number of processes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import thorough
from common import evaluations, fresh_accelerator
from run_reference import Bigrams, Pairs

from samestep.step.log_probabilities import count_tokens
from samestep.training import evaluation
from samestep.training.evaluation import evaluate_logits, score_pairs
from samestep.training.launch import create_accelerator

# There are many micro-batches, and the last one is smaller.
EVALUATE = " --max_train_steps 1 --per_device_eval_batch_size 4"
# Program's name and the run's -> flags beside its tiny model's; by the number of processes.
RUNS = {
    2: {
        "pretrain_bert/pairs": "",
        "finetune_classifier/texts": "",
        "train_captcha/captchas": "",
        "finetune_causal_lm/chats": "",
    },
    3: {
        "pretrain_gpt2/documents": " --packing false --train_file CORPUS/short.jsonl",
        "finetune_classifier/texts": "",
        "finetune_causal_lm/chats": "",
        "train_image_classifier/batch": " --normalization batch --per_device_eval_batch_size 30",
    },
}


@pytest.mark.distributed
@pytest.mark.parametrize(("num_processes", "precision"), [thorough(2, "no"), (3, "no"), thorough(3, "bf16")])
def test_the_same_to_the_bit_on_any_number_of_processes(train, train_on, monkeypatch, num_processes, precision):
    runs = {name: EVALUATE + flags for name, flags in RUNS[num_processes].items()}
    folder = train_on(num_processes, {f"{name}-shared": flags for name, flags in runs.items()}, precision=precision)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    for name, flags in runs.items():
        alone = train(name, flags, program=name.split("/")[0])
        assert evaluations(folder / f"{name}-shared")[0] == evaluations(alone)[0], name


class Model(Bigrams):
    """Two terms with two denominators."""

    def forward(self, **micro_batch):
        logps = self.sequence_log_probabilities(**micro_batch)
        num_tokens = count_tokens(micro_batch["label_sequence"], len(logps))
        from samestep.contrib.preferences import sum_terms  # here: a room that may be missing

        sums, _, margins = sum_terms("orpo", ["sft", "odds"], logps, num_tokens)
        return sums, margins[:, None]


def test_preferences_have_an_accuracy_and_a_mean_margin_over_pairs():
    """In micro-batches of 4 pairs, the last of 3."""
    fresh_accelerator()
    model, pairs = Model(torch.float64), Pairs()
    totals, margins = evaluate_logits(create_accelerator(), model, pairs, 0, 4)
    micro_batch = pairs.collate([pairs.draw(0, number) for number in range(len(pairs))])
    counts = micro_batch.pop("counts")
    sums, true = model.eval()(**micro_batch)
    assert totals[0].tolist() == pytest.approx(sums.tolist(), rel=1e-12)
    assert totals[2].tolist() == counts.tolist()
    scores = score_pairs(margins)
    assert 0 < scores["accuracy"] < 1
    assert scores == pytest.approx(
        {"accuracy": (true > 0).double().mean().item(), "margin": true.mean().item()}, rel=1e-12
    )


def test_sources_are_evaluated_apart_and_together():
    """Of each source, and of all, what one forward of their samples gives."""
    fresh_accelerator()
    model, pairs = Model(torch.float64), Pairs()
    numbers = np.arange(len(pairs)) ** 2 % 3 % 2  # of each sample its source: a third of them are of the first
    pairs.source_names, pairs.source_numbers = ("first", "second"), numbers
    recipe = SimpleNamespace(seed=0, objective="orpo")
    accelerator = create_accelerator()
    whole, sources = evaluation.evaluate_by_source(accelerator, model, pairs, recipe, 4)
    totals, by_source = whole.totals, [sources[name].totals for name in pairs.source_names]
    for got, ids in ((totals, range(len(pairs))), *((by_source[n], np.flatnonzero(numbers == n)) for n in (0, 1))):
        micro_batch = pairs.collate([pairs.draw(0, int(number)) for number in ids])
        counts = micro_batch.pop("counts")
        sums, true = model.eval()(**micro_batch)
        assert got[0].tolist() == pytest.approx(sums.tolist(), rel=1e-12)
        assert got[2].tolist() == counts.tolist()
    assert sources["second"].scores["margin"] == pytest.approx(true.mean().item(), rel=1e-12)
    pairs.source_names, pairs.source_numbers = ("only",), numbers * 0
    whole, sources = evaluation.evaluate_by_source(accelerator, model, pairs, recipe, 4)
    assert sources == {}
    assert torch.equal(whole.totals, evaluate_logits(accelerator, model, pairs, 0, 4)[0])
