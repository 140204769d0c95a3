"""What fits into memory is found before the first step, the same on every process, and remembered."""

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch
from cases import thorough
from common import all_metrics, fresh_accelerator, model_of, samples_of_steps
from compare import check, same_weights, untimed_metrics
from faults import limit_memory
from hooks import Watch

from samestep.errors import RunError
from samestep.training import capacity, kernels, launch, micro_batch_size


@pytest.fixture
def tries(monkeypatch):
    """Record the numbers of samples that were tried."""
    tried, original = [], micro_batch_size._try

    def noting(recovery, forward_backward, num_samples):
        tried.append(num_samples)
        return original(recovery, forward_backward, num_samples)

    monkeypatch.setattr(micro_batch_size, "_try", noting)
    return tried


def largest_micro_batch(output_dir) -> int:
    return max(len(json.loads(line)["samples"]) for line in (output_dir / "samples.jsonl").open())


@pytest.mark.parametrize(
    ("holds", "tried", "cap", "program"),
    [
        thorough(99, [20], 20, "pretrain_gpt2"),
        thorough(10, [20, 10], 10, "pretrain_bert"),
        (9, [20, 10, 5, 7], 7, "pretrain_bert"),  # 3 micro-batches: 2 do not fit
        thorough(9, [20, 10, 5, 7], 7, "pretrain_gpt2"),
        thorough(6, [20, 10, 5, 7], 5, "pretrain_bert"),
        (3, [20, 10, 5, 3, 4], 3, "pretrain_bert"),  # 20 in 7 micro-batches; 5 (4 samples) and 6 (4 samples) do not fit
        thorough(1, [20, 10, 5, 3, 2, 1], 1, "pretrain_gpt2"),
    ],
)
def test_the_fewest_micro_steps_that_fit(train, tries, holds, tried, cap, program):
    """Nothing of the result depends on it, and the second start tries nothing."""
    flags = "--global_batch_size 20 --record_samples --dtype float64"
    with limit_memory(program, lambda: holds):
        automatic = train("found", flags, program=program)
        assert tries == tried
        assert largest_micro_batch(automatic) == cap
        again = train("again", flags, program=program)
    assert tries == tried
    assert untimed_metrics(again) == untimed_metrics(automatic)
    assert not [line for line in all_metrics(automatic) if "event" in line], "memory never ran out in a step"
    manual = train("given", flags + f" --per_device_train_batch_size {cap}", program=program)
    check(automatic, manual, "float64")
    assert same_weights(automatic, manual)


def test_what_is_asked_for_is_tried_and_lowered(train, tries, capsys):
    flags = "--global_batch_size 20 --record_samples --per_device_train_batch_size "
    with limit_memory("pretrain_bert", lambda: 5):
        assert largest_micro_batch(train("eight", flags + "8")) == 4
        assert tries == [8, 4]
        assert (
            "4 of the largest samples (sample of 48 tokens) fit into memory at once: global batch 20 = "
            in capsys.readouterr().out
        )
        assert largest_micro_batch(train("four", flags + "4")) == 4
        assert tries == [8, 4], "4 are known to fit"
    assert largest_micro_batch(train("again", flags + "8")) == 8
    assert tries == [8, 4, 8], "what was asked for is tried again: memory may be free now"


def test_with_a_cap_on_tokens(train, tries):
    """At most 240 tokens are 5 of the longest samples, and many more short ones."""
    flags = "--global_batch_size 20 --record_samples --per_device_train_tokens 240"
    with limit_memory("pretrain_bert", lambda: 8):
        assert largest_micro_batch(train("run", flags)) <= 8
    assert tries == [5]


def test_no_more_than_the_fastest_size_is_rehearsed(train, monkeypatch, tries):
    """On a CPU, where a rehearsal of all samples at once would be the largest memory of the run; nor a larger size than needed
    for speed."""
    monkeypatch.setattr(kernels, "_measure_fastest", lambda *arguments: next(iter(arguments[-1])))
    seconds, sizes = {20: 1.0, 10: 0.99, 5: 1.01, 2: 1.2, 1: 1.5}, []

    def measure(_, computations):
        sizes.extend(computations)
        return {size: seconds[size] for size in computations}

    monkeypatch.setattr(kernels, "measure", measure)
    output_dir = train("run", "--global_batch_size 20 --record_samples --speed auto", program="pretrain_gpt2")
    assert sizes == [20, 10, 5, 2, 1], "of 48 tokens, 960 of them first, as 480 are few"
    assert tries == [5]
    assert largest_micro_batch(output_dir) == 5


def test_not_even_one_sample_fits(train):
    with (
        limit_memory("pretrain_bert", lambda: 0),
        pytest.raises(RunError, match="not one sample of 48 tokens fits into the memory of cpu: try --gradient_ch"),
    ):
        train("run", "--global_batch_size 4")
    train("run", "--global_batch_size 4 --overwrite_output_dir")


def test_trying_sizes_leaves_no_trace(train, tries):
    """With and without it, the same bits, dropout on."""
    flags = "--global_batch_size 8 --per_device_train_batch_size 3 --hidden_dropout_prob 0.1"
    tried_out = train("tried_out", flags)
    not_tried = train("not_tried", flags + " --logging_steps 10")
    assert tries == [3], "they are known to fit"
    assert untimed_metrics(tried_out) == untimed_metrics(not_tried)
    assert same_weights(tried_out, not_tried)


def test_trying_sizes_leaves_running_statistics_alone():
    fresh_accelerator()
    model = torch.nn.BatchNorm1d(3)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    source = SimpleNamespace(
        longest=lambda: 0, collate=lambda rows: {"x": torch.randn(len(rows), 3), "counts": torch.tensor([len(rows)])}
    )
    recovery = SimpleNamespace(
        accelerator=launch.create_accelerator(),
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        steps=SimpleNamespace(source=source),
        agree=bool,
        reduction=SimpleNamespace(discard_gradients=contextlib.nullcontext),
    )
    assert micro_batch_size._try(recovery, lambda micro_batch, counts: model(micro_batch["x"]).sum().backward(), 4)
    assert all(buffer.equal(buffers[name]) for name, buffer in model.named_buffers())
    assert model.weight.grad is None


def test_the_worst_micro_batch_is_the_longest_with_gradients_and_moments(train, after_forward):
    """Two micro-batches of samples of the greatest length, while AdamW's moments are taken."""
    calls, moments = [], []

    def note(model, outputs, input_ids, **micro_batch):
        if torch.is_grad_enabled() and len(calls) < 2:
            calls.append((tuple(input_ids.shape), len(moments), next(model.parameters()).grad is not None))

    after_forward(model_of("pretrain_gpt2"), note)
    with Watch(torch.empty_like, lambda empty, p, **options: moments.append(p) or empty(p, **options)):
        train("run", "--global_batch_size 8 --per_device_train_batch_size 3", program="pretrain_gpt2")
    num_parameters = len(set(map(id, moments)))
    assert calls == [((3, 48), 2 * num_parameters, False), ((3, 48), 2 * num_parameters, True)]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 3}', '{"a": {"fits": "b"}}', "\x00"])
def test_a_cache_that_cannot_be_read_is_done_without(train, tries, text):
    capacity.FILE.write_text(text)
    train("run", "--global_batch_size 4 --stop_after_step 1")
    assert tries == [4]
    (values,) = json.loads(capacity.FILE.read_text()).values()
    assert values == {"fits": 4, "fails": None, "way": None, "at_once": None}


def test_another_recipe_precision_or_kernel_is_another_question(train, tries):
    for flags in ("", " --learning_rate 1e-3", " --dtype float64", " --gradient_checkpointing", ""):
        train("run", f"--global_batch_size 4 --stop_after_step 1 --overwrite_output_dir{flags}")
    assert tries == [4] * 4


@pytest.mark.distributed
def test_processes_agree(train, train_on):
    """Every process tries its own share, and two processes give what one gives."""
    flags = "--global_batch_size 10 --dtype float64 --record_samples"
    two = train_on(2, {"two": flags}) / "two"
    assert largest_micro_batch(two) == 5
    check(two, train("one", flags), "float64")
    assert samples_of_steps(two) == samples_of_steps(two.parent / "one")
