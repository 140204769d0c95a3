"""`audit_step` finds each fault, names it and its module, and accuses nothing that is exact."""

import copy
import os
import random
import sys
import types

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common import ROOT
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(ROOT / "tests" / "audited"))
from common_models import VOCAB, bert, collate, gpt2, llama, sentences

from samestep import noise_by_sample
from stepaudit import Cut, assert_same_step, audit_step, default_cuts
from stepaudit import processes as process_runner
from stepaudit.entrance import find_generator, is_close
from stepaudit.errors import UsageError
from stepaudit.loops import terms

QUARTERS = [Cut(4)]


class Tagger(nn.Module):
    """Labels every token; `middle` is a module between the embedding and the head."""

    def __init__(self, middle: nn.Module | None = None):
        super().__init__()
        self.embedding, self.middle, self.head = nn.Embedding(VOCAB, 16), middle, nn.Linear(16, VOCAB)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        return self.head(x if self.middle is None else self.middle(x))


class FunctionModule(nn.Module):
    """Wraps a function as a module: x [batch, length, width] -> [batch, length, width]."""

    def __init__(self, function, *modules: nn.Module):
        super().__init__()
        self.function, self.inner = function, nn.ModuleList(modules)

    def forward(self, x):
        return self.function(x, *self.inner)


def loss(model, batch):
    total = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return total, (batch["labels"] != -100).sum()


def mean_loss(model, batch):
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()), loss(model, batch)[1]


def loss_with_padding(model, batch):
    return loss(model, batch)[0], batch["labels"].numel()


def two_terms(model, batch):
    """Sum the losses of tokens, and of whether the first token is even."""
    logits = model(batch["input_ids"])
    tokens = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    rows = F.cross_entropy(logits[:, 0, :2], batch["input_ids"][:, 0] % 2, reduction="sum")
    return {"tokens": (tokens, (batch["labels"] != -100).sum()), "rows": (rows, len(logits))}


def noisy_collate(samples, draw=torch.rand):
    batch = collate(samples)
    return batch | {"labels": torch.where(draw(batch["labels"].shape) < 0.5, batch["labels"], -100)}


def batch_norm(x, norm):
    return norm(x.transpose(1, 2)).transpose(1, 2)


@pytest.fixture
def samples():
    return sentences(16, kind="mlm")


@pytest.fixture(autouse=True)
def seed_torch():
    torch.manual_seed(0)


# ---------------------------------------------------------------------------------------------- a loss

FAULTS = {
    "batch_norm": (FunctionModule(batch_norm, nn.BatchNorm1d(16)), loss, "middle.inner.0 (BatchNorm1d)"),
    "dropout": (nn.Sequential(nn.Dropout(0.1), nn.Tanh()), loss, "middle.0 (Dropout)"),
    "mixed_samples": (
        FunctionModule(lambda x, inner: inner(x - x.mean((0, 1))), nn.Linear(16, 16)),
        loss,
        "middle (FunctionModule)",
    ),
    "padding": (
        nn.Sequential(nn.Identity(), FunctionModule(lambda x: x - x.mean(1, keepdim=True))),
        loss,
        "middle.1 (FunctionModule)",
    ),
    "not_summed": (None, mean_loss, "mean_loss"),
    "counts": (None, loss_with_padding, "loss_with_padding"),
}


@pytest.mark.parametrize("cause", FAULTS)
def test_a_fault_of_the_model_or_the_loss(cause, samples):
    middle, loss_function, place = FAULTS[cause]
    audit = audit_step(Tagger(middle), samples, collate, loss_function)
    assert not audit.is_exact
    assert audit.causes == {cause}
    for comparison in audit.comparisons:
        ((finding,),) = [comparison.findings]
        assert finding.where == place
    assert "NOT exact" in str(audit)


def test_several_modules_are_named_also_functions_that_draw(samples):
    model = Tagger(nn.Sequential(nn.Dropout(0.1), FunctionModule(lambda x: x)))
    model.middle[1].forward = types.MethodType(lambda self, x: F.dropout(x, 0.1, self.training), model.middle[1])
    model.middle.append(FunctionModule(batch_norm, nn.BatchNorm1d(16)))
    (comparison,) = audit_step(model, samples, collate, loss, cuts=QUARTERS).comparisons
    assert [(finding.cause, finding.where) for finding in comparison.findings] == [
        ("dropout", "middle.0 (Dropout), middle.1 (FunctionModule)"),
        ("batch_norm", "middle.2.inner.0 (BatchNorm1d)"),
    ]


class PlaceDropout(nn.Dropout):
    """Hashes places in the micro-batch: [batch, length, width]; with `is_of_size`, the size of the micro-batch, too."""

    def __init__(self, p: float, is_of_size: bool):
        super().__init__(p)
        self.is_of_size = is_of_size

    def forward(self, x):
        numbers = torch.arange(len(x))[:, None, None] * 7919 + torch.arange(x.shape[2]) + self.is_of_size * 31 * len(x)
        return x * ((numbers * 2654435761 % 2**32) / 2**32 >= self.p) / (1 - self.p) if self.training else x


@pytest.mark.distributed
def test_dropout_by_sample_is_exact_and_by_place_is_not(samples):
    """Copies of the model, also those in other processes, are told the samples of each micro-batch by the loss."""

    def collate_with_ids(samples):
        ids = torch.tensor([number for number, _ in samples])
        return collate([sample for _, sample in samples]) | {"ids": ids}

    numbered = list(enumerate(samples))
    model = Tagger(nn.Sequential(nn.Dropout(0.3), nn.Tanh()))
    noise = noise_by_sample(model, seed=0)

    def loss_by_sample(model, batch):
        noise.set_samples([(0, number) for number in batch["ids"].tolist()])
        return loss(model, batch)

    audit = audit_step(model, numbered, collate_with_ids, loss_by_sample, processes=(1, 2))
    assert audit.is_exact, audit
    cause = [("dropout", "middle.0 (Dropout)")]
    noise.samples = None  # not told, it is by place
    untold = audit_step(model, numbered, collate_with_ids, loss, cuts=QUARTERS)
    assert [(finding.cause, finding.where) for finding in untold.comparisons[0].findings] == cause
    for is_of_size in (False, True):
        model.middle[0] = PlaceDropout(0.3, is_of_size)
        audit = audit_step(model, samples, collate, loss, cuts=QUARTERS)
        found = [(finding.cause, finding.where) for finding in audit.comparisons[0].findings]
        assert found == [("dropout", "middle.0 (PlaceDropout)")]


def test_a_collate_function_that_draws(samples):
    audit = audit_step(Tagger(), samples, noisy_collate, loss, cuts=QUARTERS)
    assert audit.causes == {"random_collate"}
    assert audit.comparisons[0].findings[0].where == "collate"

    def collate_with_numpy(samples):
        return noisy_collate(samples, draw=lambda shape: torch.from_numpy(np.random.rand(*shape)))

    for draws in (noisy_collate, collate_with_numpy):
        audit = audit_step(Tagger(), samples, draws, loop=documented_loop, cuts=QUARTERS)
        assert audit.causes == {"random_collate"}, draws


def test_padding_on_the_left_is_no_fault(samples):
    def collate_left(samples):
        return {
            name: value.flip(1) for name, value in collate([_reverse(s) for s in samples]).items() if value.ndim > 1
        }

    def _reverse(sample):
        return {name: value.flip(0) if value.ndim else value for name, value in sample.items()}

    assert audit_step(Tagger(), samples, collate_left, loss, cuts=QUARTERS).is_exact
    assert audit_step(Tagger(), samples, collate_left, mean_loss, cuts=QUARTERS).causes == {"not_summed"}


def test_infinite_numbers_are_compared():
    inf, nan = float("inf"), float("nan")
    assert is_close(torch.tensor([1.0, -inf, nan]), torch.tensor([1.0, -inf, nan]))
    assert not is_close(torch.tensor([1.0, -inf]), torch.tensor([1.0, 2.0]))
    assert not is_close(torch.tensor([1.0, nan]), torch.tensor([1.0, 2.0]))
    assert is_close(torch.zeros(2), torch.zeros(2))
    assert not is_close(torch.zeros(2), torch.ones(2))


def test_floating_point_inputs_have_the_dtype_of_the_cut():
    samples = [(torch.randn(4), torch.randn(())) for _ in range(8)]

    def stack(samples):
        return [torch.stack(values) for values in zip(*samples, strict=True)]

    def sum_squares(model, batch):
        return F.mse_loss(model(batch[0]).squeeze(1), batch[1], reduction="sum"), len(batch[1])

    assert audit_step(nn.Linear(4, 1), samples, stack, sum_squares).is_exact


@pytest.mark.parametrize("loss_function", [loss, two_terms])
def test_what_is_exact_is_not_accused(loss_function, samples):
    """Seven cuts, uneven, in another order, rounded: all as exact as their numbers are."""
    audit = audit_step(Tagger(nn.LayerNorm(16)), samples, collate, loss_function)
    assert audit.is_exact
    assert [str(cut) for cut in audit.cuts] == [str(cut) for cut in default_cuts(16)]
    largest_errors = {
        cut.dtype: max(comparison.errors) for cut, comparison in zip(audit.cuts, audit.comparisons, strict=True)
    }
    assert largest_errors["float64"] < 1e-13
    assert 1e-9 < largest_errors["float32"] < 1e-5
    assert 1e-4 < largest_errors["bfloat16"] < 5e-2
    assert max(comparison.loss_errors[0] for comparison in audit.comparisons[:5]) < 1e-13
    assert str(audit).endswith("\nexact")


def test_several_steps_the_last_of_them_partial_and_a_term_without_targets(samples):
    def no_rows(model, batch):
        sums = two_terms(model, batch)
        return {"tokens": sums["tokens"], "rows": (0 * sums["rows"][0], 0)}

    for loss_function in (loss, no_rows):
        (comparison,) = audit_step(
            Tagger(), samples, collate, loss_function, cuts=[Cut(2)], global_batch_size=6
        ).comparisons
        assert not comparison.findings
        assert len(comparison.errors) == 3
        assert max(comparison.errors) < 1e-13


def test_the_truth_is_the_models_own_mean(samples):
    """One large batch, by sums and counts, has the loss and the gradient of the usual mean."""
    audit = audit_step(Tagger(), samples, collate, loss, loop=documented_loop, cuts=[Cut(16)], global_batch_size=16)
    assert audit.is_exact
    assert audit.comparisons[0].errors[0] < 1e-14


def test_rounding_that_is_larger_than_the_tolerance(samples):
    cuts = [Cut(4), Cut(4, dtype="float32")]
    audit = audit_step(Tagger(), samples, collate, loss, cuts=cuts, tolerance={"float32": 1e-12})
    assert [comparison.is_exact for comparison in audit.comparisons] == [True, False]
    assert audit.causes == {"rounding"}
    assert "tolerance 1e-12" in str(audit)


def test_low_precision_is_given_the_cause_of_the_same_cut(samples):
    cuts = [Cut(4), Cut(4, dtype="bfloat16")]
    exact, rounded = audit_step(Tagger(), samples, collate, mean_loss, cuts=cuts).comparisons
    assert exact.findings == rounded.findings
    assert rounded.findings[0].cause == "not_summed"


def test_everything_is_left_as_it_was(samples):
    model = Tagger(FunctionModule(batch_norm, nn.BatchNorm1d(16))).eval()
    state, torch_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    np.random.seed(5)
    numpy_state = np.random.get_state()[1].copy()
    call = nn.Module.__call__
    audit_step(model, samples, collate, loss)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not model.training
    assert not model.middle.inner[0]._forward_hooks
    assert torch.get_rng_state().equal(torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()
    assert nn.Module.__call__ is call
    assert model.head.weight.grad is None


# ---------------------------------------------------------------------------------------------- Hugging Face models


@pytest.mark.parametrize(
    ("build", "kind", "causes", "place"),
    [
        (llama, "clm", set(), ""),
        (gpt2, "clm", {"shifted_labels"}, "GPT2LMHeadModel, step 1"),
        (lambda: bert("BertForPreTraining"), "mlm", {"ignores_num_items"}, "BertForPreTraining, step 1"),
        (
            lambda: bert("BertForSequenceClassification"),
            "cls",
            {"ignores_num_items"},
            "BertForSequenceClassification, step 1",
        ),
    ],
)
def test_a_plain_model_with_labels(build, kind, causes, place):
    audit = audit_step(build(), sentences(16, kind=kind), collate, cuts=[Cut(4), Cut(5)])
    assert audit.causes == causes
    assert {finding.where for comparison in audit.comparisons for finding in comparison.findings} == (
        {place} if causes else set()
    )
    if build is gpt2:  # beside the model's own mean
        assert audit.comparisons[0].errors[0] == pytest.approx(1 - 183 / 199)


class LossTagger(Tagger):
    """Computes a loss itself, as transformers' models do."""

    def forward(self, input_ids, attention_mask, labels, num_items_in_batch=None, **_):
        logits = super().forward(input_ids).flatten(0, 1)
        total = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        return types.SimpleNamespace(loss=total / (num_items_in_batch or (labels != -100).sum()))


class MeanLossTagger(LossTagger):
    def forward(self, input_ids, attention_mask, labels, next_sentence_label=None):
        return super().forward(input_ids, attention_mask, labels)


def test_a_model_that_takes_no_number_is_divided_by_k(samples):
    assert audit_step(MeanLossTagger(), EVEN, collate, cuts=[Cut(4), Cut(2)], global_batch_size=8).is_exact
    assert audit_step(MeanLossTagger(), samples, collate, cuts=QUARTERS).causes == {"mean_of_means"}


# ---------------------------------------------------------------------------------------------- loops


def _run_usual_loop(
    model, optimizer, batches, k, *, divide=True, mean=True, end_backward=None, begin_forward=None, zero_grad=True
):
    """Run the usual loop, each part of which can be made wrong."""
    for number, batch in enumerate(batches, 1):
        if begin_forward:
            begin_forward(model, number)
        total, count = loss(model, batch)
        ((total / count if mean else total) / (k if divide else 1)).backward()
        if end_backward:
            end_backward(model, number)
        if number % k == 0 or number == len(batches):
            optimizer.step()
            if zero_grad:
                optimizer.zero_grad()


def documented_loop(model, optimizer, batches, k):
    _run_usual_loop(model, optimizer, batches, k)


def accelerate_loop(model, optimizer, batches, k):
    """Accumulate as Accelerate documents it; on several processes the batches are shared out already."""
    accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    batches = accelerator.prepare(batches) if accelerator.num_processes == 1 else batches
    for batch in batches:
        with accelerator.accumulate(model):
            total, count = loss(model, batch)
            accelerator.backward(total / count)
            optimizer.step()
            optimizer.zero_grad()


def undivided_loop(model, optimizer, batches, k):
    _run_usual_loop(model, optimizer, batches, k, divide=False)


def never_emptying_loop(model, optimizer, batches, k):
    _run_usual_loop(model, optimizer, batches, k, zero_grad=False)


def early_clipping_loop(model, optimizer, batches, k):
    _run_usual_loop(
        model, optimizer, batches, k, end_backward=lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    )


def often_emptying_loop(model, optimizer, batches, k):
    _run_usual_loop(model, optimizer, batches, k, begin_forward=lambda model, _: model.zero_grad())


def omitting_loop(model, optimizer, batches, k):
    for number, batch in enumerate(batches, 1):
        if number != 2:
            total, count = loss(model, batch)
            (total / count / k).backward()
        if number % k == 0 or number == len(batches):
            optimizer.step()
            optimizer.zero_grad()


def repeating_loop(model, optimizer, batches, k):
    for number, batch in enumerate(batches, 1):
        for _ in range(2 if number == 2 else 1):
            total, count = loss(model, batch)
            (total / count / k).backward()
        if number % k == 0 or number == len(batches):
            optimizer.step()
            optimizer.zero_grad()


def exact_loop(model, optimizer, batches, k):
    """Take sums over the counts of the window, as in README; on several processes, over the counts of all of them."""
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    model = DistributedDataParallel(model) if num_processes > 1 else model
    window = []
    for number, batch in enumerate(batches, 1):
        window.append(batch)
        if len(window) < k and number < len(batches):
            continue
        count = sum((micro_batch["labels"] != -100).sum() for micro_batch in window)
        if num_processes > 1:
            torch.distributed.all_reduce(count)
        for micro_batch in window:
            (loss(model, micro_batch)[0] * num_processes / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        window = []


EVEN = [
    {"input_ids": torch.arange(row, row + 6) % VOCAB, "labels": torch.arange(row, row + 6) % 9} for row in range(20)
]
LOOPS = {  # on 20 ragged samples in steps of 8, 8, 4, or on equal ones, or in steps of 10
    "exact": (exact_loop, False, set()),
    "exact on equal samples": (exact_loop, True, set()),
    "documented": (documented_loop, False, {"mean_of_means", "tail"}),
    "documented on equal samples": (documented_loop, True, {"tail"}),
    "with_accelerate": (accelerate_loop, False, {"mean_of_means", "tail"}),
    "with_accelerate on equal samples": (accelerate_loop, True, {"tail"}),
    "undivided": (undivided_loop, True, {"factor"}),
    "never_emptied": (never_emptying_loop, True, {"leak"}),
    "clipped_too_early": (early_clipping_loop, True, {"changed_between"}),
    "emptied_too_often": (often_emptying_loop, True, {"emptied_between"}),
    "batches_left_out": (omitting_loop, True, {"dropped"}),
    "batches_used_twice": (repeating_loop, True, {"duplicated"}),
}


# Against itself: one batch is a whole step of the reference, in which another one would be left out, or used twice.
CASES = [(name, has_loss) for name in LOOPS for has_loss in (True, False) if has_loss or not name.startswith("batches")]


@pytest.mark.parametrize(("name", "has_loss"), CASES)
def test_a_loop(name, has_loss):
    loop, is_even, causes = LOOPS[name]
    data = EVEN if is_even else sentences(20, kind="mlm")
    cuts = [Cut(2)] if causes else [Cut(2), Cut(3), Cut(2, is_shuffled=True)]
    global_batch_size = 10 if name.startswith("batches") else 8
    audit = audit_step(
        Tagger(), data, collate, loss if has_loss else None, loop=loop, cuts=cuts, global_batch_size=global_batch_size
    )
    assert {finding.cause for comparison in audit.comparisons for finding in comparison.findings} == causes
    assert all(len(comparison.errors) == -(-20 // global_batch_size) for comparison in audit.comparisons)
    assert audit.is_exact == (not causes)
    assert {comparison.cause for comparison in audit.findings} == (causes & {"leak"} if not has_loss else set())


def test_a_loop_has_a_partial_last_step_unless_told_otherwise():
    (comparison,) = audit_step(Tagger(), EVEN[:10], collate, loss, loop=documented_loop, cuts=[Cut(2)]).comparisons
    assert [(finding.cause, finding.where) for finding in comparison.findings] == [("tail", "step 3")]


def test_the_mean_of_means_of_two_terms_is_named_with_both_counts():
    def average_means(model, optimizer, batches, k):
        for batch in batches:
            pairs = two_terms(model, batch).values()
            sum(total / count / k for total, count in pairs).backward()
        optimizer.step()

    data = sentences(16, kind="mlm")
    (comparison,) = audit_step(
        Tagger(), data, collate, two_terms, loop=average_means, cuts=QUARTERS, global_batch_size=16
    ).comparisons
    (finding,) = comparison.findings
    assert finding.cause == "mean_of_means"
    assert finding.evidence == "targets of the micro-batches: 12+4, 20+4, 16+4, 11+4"


@pytest.mark.parametrize("has_loss", [True, False])
def test_a_fault_of_the_model_is_named_inside_a_loop_too(has_loss, samples):
    model = Tagger(FunctionModule(batch_norm, nn.BatchNorm1d(16)))
    loss_function = loss if has_loss else None
    audit = audit_step(model, samples, collate, loss_function, loop=exact_loop, cuts=QUARTERS, global_batch_size=16)
    assert [(finding.cause, finding.where) for finding in audit.comparisons[0].findings] == [
        ("batch_norm", "middle.inner.0 (BatchNorm1d)")
    ]


# ---------------------------------------------------------------------------------------------- processes


@pytest.mark.distributed
def test_two_processes(samples, server, monkeypatch):
    """Send a model, and functions of a module that cannot be imported. Audit loops that wrap the model, and one without.

    The processes are forked; those of other tests of this file are launched.
    """

    def run_forked(command, num_processes, title, timeout, stacks=None):
        server.run([command[-1], command[-1]], num_processes, timeout, module="run_audit_step")

    monkeypatch.setattr(process_runner, "run", run_forked)
    module = types.ModuleType("cannot_be_imported")
    module.__file__ = "somewhere"
    exec("import torch\ndef loss(model, batch):\n    return inner_loss(model, batch)", module.__dict__)
    module.inner_loss = loss
    cuts = [Cut(4, num_processes=2), Cut(3, num_processes=2, is_shuffled=True), Cut(16, num_processes=2)]
    sys.modules["cannot_be_imported"] = module
    try:
        audit = audit_step(Tagger(nn.LayerNorm(16)), samples, collate, module.loss, cuts=cuts)
    finally:
        del sys.modules["cannot_be_imported"]
    assert "cannot_be_imported" not in cloudpickle.list_registry_pickle_by_value()
    assert audit.is_exact
    assert max(comparison.errors[0] for comparison in audit.comparisons) < 1e-13
    trainer_audit = audit_step(LossTagger(), samples, collate, cuts=cuts)
    assert trainer_audit.is_exact
    assert max(comparison.loss_errors[0] for comparison in trainer_audit.comparisons) < 1e-13

    def loop(model, optimizer, batches, k):
        loops = {1: documented_loop, 2: exact_loop, 4: accelerate_loop}  # documented_loop does not reduce
        loops[k](model, optimizer, batches, k)

    cuts = [Cut(b, num_processes=2) for b in (2, 4, 1)]
    exact, unreduced, accelerate = audit_step(Tagger(), EVEN, collate, loss, loop=loop, cuts=cuts).comparisons
    assert [finding.cause for finding in exact.findings] == ["reductions"]
    assert "not_reduced" in {finding.cause for finding in unreduced.findings}
    assert [(finding.cause, finding.where) for finding in accelerate.findings] == [("last_window", "at the end")]


def test_a_failure_deep_in_a_library_names_the_line_of_the_program(tmp_path):
    program = tmp_path / "mine.py"
    program.write_text("import copy\n\nrow = [[[[[[[(x for x in ())]]]]]]]\ncopy.deepcopy(row)\n", encoding="utf-8")
    with pytest.raises(UsageError) as error:
        process_runner.run([sys.executable, str(program)], 1, "mine.py", 60)
    title, place, line, gap, *end = str(error.value).splitlines()
    assert (title, gap, len(end)) == ("mine.py failed:", "    ...", process_runner.END - 3)
    assert place.endswith('mine.py", line 4, in <module>')
    assert line.strip() == "copy.deepcopy(row)"
    assert end[-1].strip().startswith("TypeError: cannot pickle 'generator'")
    program.write_text("raise KeyError('mine')\n", encoding="utf-8")  # all of it is the end
    with pytest.raises(
        UsageError, match=r"^mine.py failed:\n  Traceback .*\n    File .*mine.py\", line 1(.|\n)*KeyError"
    ):
        process_runner.run([sys.executable, str(program)], 1, "mine.py", 60)


@pytest.mark.distributed
def test_processes_that_fail_or_wait(samples):
    def failing_loss(model, batch):
        if os.environ.get("RANK") == "1":
            raise KeyError("mine")
        return loss(model, batch)

    # process 0 loses its connection to the one that failed
    with pytest.raises(UsageError, match=r"failed \(process 1 of 2\):(.|\n)*KeyError: 'mine'"):
        audit_step(Tagger(), samples, collate, failing_loss, cuts=[Cut(4, num_processes=2)])
    wait_for_ever = [sys.executable, "-c", "import signal; signal.pause()"]
    with pytest.raises(UsageError, match=r"the audit took longer than 0\.1 seconds"):
        process_runner.run(wait_for_ever, 2, "the audit", 0.1)


# ---------------------------------------------------------------------------------------------- cuts, bad input


@given(st.integers(1, 9), st.integers(1, 4), st.integers(4, 40), st.integers(4, 20), st.booleans())
def test_a_cut_has_every_sample_once(b, num_processes, num_samples, global_batch_size, is_shuffled):
    smallest = num_samples % global_batch_size or global_batch_size
    if smallest < num_processes:
        return
    cut = Cut(b, num_processes, is_shuffled=is_shuffled)
    steps = zip(*(cut.micro_batches(num_samples, global_batch_size, r) for r in range(num_processes)), strict=True)
    for number, processes in enumerate(steps):
        assert len({len(micro_steps) for micro_steps in processes}) == 1
        sizes = [len(sample) for micro_steps in processes for sample in micro_steps]
        assert min(sizes) >= 1
        assert max(sizes) <= b + (num_processes > 1)
        start = number * global_batch_size
        expected = range(start, min(start + global_batch_size, num_samples))
        assert sorted(sample for micro_steps in processes for part in micro_steps for sample in part) == list(expected)


def test_a_shuffled_cut_has_another_order_within_its_steps():
    first, second = Cut(10, is_shuffled=True).micro_batches(20, 10, 0)
    assert first[0] != sorted(first[0])
    assert [sample - 10 for sample in second[0]] != first[0]


def test_sums_and_counts_in_several_forms():
    for returned in (
        (torch.tensor(3.0), 2),
        ([torch.tensor(3.0)], [2]),
        (torch.tensor([3.0]), torch.tensor([2])),
        {"one": (torch.tensor(3.0), torch.tensor(2))},
    ):
        sums, counts = terms(returned)
        assert (sums.tolist(), counts.tolist()) == ([3.0], [2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "model is str: it must be a torch module"),
        ({"samples": [1]}, "samples are 1: at least 2"),
        ({"loss": lambda model, batch: torch.tensor(1.0)}, r"loss must return \(sum, count\).*not Tensor"),
        ({"loss": lambda model, batch: (torch.tensor(1.0), 1, 2)}, "not a tuple of 3"),
        ({"loss": lambda model, batch: (torch.tensor(1.0), 0.5)}, r"counts \[0.5\]: numbers of targets are whole"),
        ({"loss": None, "collate": lambda samples: samples}, 'batches must be mappings with "labels"'),
        ({"loop": lambda *_: None}, "the loop takes no step"),
        ({"cuts": [Cut(0)]}, "a cut has b 0, N 1: both must be positive"),
        ({"cuts": [Cut(4, dtype="int8")]}, "dtype of a cut is 'int8': it is one of float64, float32, bfloat16"),
        ({"processes": [17]}, "a cut has 17 processes, but a step has only 16 samples"),
        ({"tolerance": -1}, "tolerance is -1: a number that is not negative"),
        ({"tolerance": {"half": 1}}, "one for float64, float32, bfloat16"),
        ({"global_batch_size": 1}, "global_batch_size is 1: a step of at least 2 samples"),
    ],
)
def test_bad_input(change, message, samples):
    arguments = {"model": Tagger(), "samples": samples, "collate": collate, "loss": loss} | change
    with pytest.raises(UsageError, match=message):
        audit_step(**arguments)


def test_assert_same_step(samples):
    assert assert_same_step(Tagger(), samples, collate, loss, cuts=QUARTERS).is_exact
    with pytest.raises(AssertionError, match=r"depends on how it is cut\nlayout(.|\n)*the loss is no sum over samples"):
        assert_same_step(Tagger(), samples, collate, mean_loss, cuts=QUARTERS)


# ---------------------------------------------------------------------------------------------- nothing sound is condemned


class Recurrent(nn.Module):
    """Labels every token by an LSTM, which returns its last states, too; nobody uses them."""

    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.embedding, self.rnn, self.head = (
            nn.Embedding(VOCAB, 8),
            kind(8, 16, batch_first=True),
            nn.Linear(16, VOCAB),
        )

    def forward(self, input_ids):
        return self.head(self.rnn(self.embedding(input_ids))[0])


class Pooled(Tagger):
    """Computes a pooled value over the padding, which nobody uses."""

    def __init__(self):
        super().__init__()
        self.pooler = FunctionModule(lambda x: x.mean(1))

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        self.pooler(x)
        return self.head(x)


@pytest.mark.parametrize("model", [Recurrent, lambda: Recurrent(nn.GRU), Pooled])
def test_padding_that_nobody_uses_does_no_harm(model, samples):
    assert audit_step(model(), samples, collate, loss, cuts=QUARTERS).is_exact
    assert audit_step(model(), samples, collate, mean_loss, cuts=QUARTERS).causes == {"not_summed"}


def test_the_last_state_over_padding_is_named_where_it_is_used(samples):
    class LastState(Recurrent):
        def forward(self, input_ids):
            states = self.rnn(self.embedding(input_ids))[1][0][-1]
            return self.head(states)[:, None].expand(-1, input_ids.shape[1], -1)

    audit = audit_step(LastState(), samples, collate, loss, cuts=QUARTERS)
    assert [(finding.cause, finding.where) for finding in audit.comparisons[0].findings] == [("padding", "rnn (LSTM)")]


def make_plain_loop(weight):
    """Make a plain loop that divides every micro-batch by a number of its own: weight(batch)."""

    def loop(model, optimizer, batches, k):
        for number, batch in enumerate(batches, 1):
            logits, labels = model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
            losses = F.cross_entropy(logits, labels, reduction="none")
            (losses.sum() / weight(batch) / k).backward()
            if number % k == 0:
                optimizer.step()
                optimizer.zero_grad()

    return loop


CLASS_WEIGHTS = torch.rand(VOCAB, generator=torch.Generator().manual_seed(3)) + 0.5
DENOMINATORS = {
    "ragged mean": (lambda batch: (batch["labels"] != -100).sum(), "mean_of_means"),
    "class weights": (
        lambda batch: CLASS_WEIGHTS[batch["labels"].clamp(min=0)][batch["labels"] != -100].sum().double(),
        "mean_of_means",
    ),
    "padding counted": (lambda batch: batch["labels"].numel(), "counts"),
}


@pytest.mark.parametrize("name", DENOMINATORS)
def test_weights_that_differ_from_micro_step_to_micro_step_are_no_factor(name, samples):
    weight, cause = DENOMINATORS[name]
    audit = audit_step(Tagger(), samples, collate, loop=make_plain_loop(weight), cuts=QUARTERS, global_batch_size=16)
    assert audit.causes == {cause}


@pytest.mark.parametrize(
    ("samples", "loss", "message"),
    [
        (iter([]), loss, "samples are list_iterator: give a list"),
        (EVEN, lambda model, batch: loss(model, batch)[0], r"loss must return \(sum, count\)"),
    ],
)
def test_samples_and_losses_of_other_kinds_end_in_one_line(samples, loss, message):
    with pytest.raises(UsageError, match=message) as error_info:
        audit_step(Tagger(), samples, collate, loss)
    assert error_info.value.__suppress_context__ or error_info.value.__context__ is None


@pytest.mark.parametrize(
    ("draw", "name"), [(np.random.rand, "numpy.random"), (random.random, "random"), (lambda: torch.rand(1), "")]
)
def test_generators_of_other_libraries_are_named(draw, name):
    """And they are left as they are."""
    before = random.getstate(), np.random.get_state()[2], torch.get_rng_state()
    assert find_generator(draw) == name
    assert (random.getstate(), np.random.get_state()[2]) == before[:2]
    assert before[2].equal(torch.get_rng_state())
