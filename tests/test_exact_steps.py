"""The exact step in a loop of one's own: the same on any number of processes, and wrong use refused in one line."""

import itertools
import json
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common import fresh_accelerator
from hooks import Watch
from run_own_loop import POINTS, Stream, squares, stack
from small_models import tiny_tokenizer
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import samestep
from samestep import evaluate, exact_steps, exact_windows, per_sample
from samestep.errors import UsageError
from samestep.step.means import find_mean

SETTINGS = {"global_batch_size": 6, "per_device_batch_size": 2, "targets": lambda batch: len(batch[0])}


@pytest.fixture
def accelerator():
    fresh_accelerator()
    yield Accelerator(cpu=True)
    fresh_accelerator()


def build(accelerator):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.distributed
def test_steps_are_the_same_on_any_number_of_processes(server, tmp_path):
    results = {}
    for size in (1, 2, 3):
        (folder := tmp_path / str(size)).mkdir()
        server.run([str(folder)], size, module="run_own_loop")
        results[size] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    (alone,) = results[1]
    for size in (2, 3):
        for process in results[size]:
            for name, case in alone.items():
                if isinstance(case, dict):
                    assert len(process[name]["losses"]) == len(case["losses"]), (size, name)
                    assert process[name]["losses"] == pytest.approx(case["losses"], rel=1e-5), (size, name)
                    assert process[name]["weights"] == pytest.approx(case["weights"], rel=1e-4, abs=1e-6), (size, name)
                    assert process[name]["ends"] == case["ends"], (size, name)
                    assert process[name].get("length") == case.get("length"), (size, name)
                else:
                    assert process[name] == pytest.approx(case, rel=1e-6), (size, name)
    assert len(alone["prepared"]["losses"]) == 4  # 2 epochs of 24 samples in steps of 12
    assert len(alone["prepared, tail"]["losses"]) == 6 == alone["prepared, tail"]["length"]
    assert alone["prepared, tail"]["ends"] == [False, False, True] * 2
    # Three steps in each of three epochs; resumed behind the first step of the second, on its samples
    assert alone["shuffled"]["ends"] == [False, False, True] * 3
    assert alone["shuffled, resumed"]["ends"] == [False, True, False, False, True]
    assert len(alone["shuffled, resumed"]["losses"]) == alone["shuffled, resumed"]["length"] == 5
    assert alone["prepared stream"]["length"] is alone["own shards"]["length"] is None
    assert alone["synchronised"] == alone["prepared, tail"]


def test_steps_are_those_of_whole_batches(accelerator):
    """And their mean loss is the batch's; the accelerator is as before."""
    model, optimizer = build(accelerator)
    steps = exact_steps(accelerator, POINTS, stack, **SETTINGS, num_epochs=1.5)
    twin = nn.Linear(4, 1)
    twin.load_state_dict(model.state_dict())
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in steps:
        whole = []
        for batch in step:
            whole.append(batch)
            with accelerator.accumulate(model):
                accelerator.backward(step.loss(squares(model, batch)[0]))
                optimizer.step()
                optimizer.zero_grad()
        x, y = (torch.cat(parts) for parts in zip(*whole, strict=True))
        assert len(x) == 6 == step.num_targets.item()
        mean = F.mse_loss(twin(x), y)
        assert step.mean_loss().item() == pytest.approx(mean.item(), rel=1e-6)
        mean.backward()
        other.step()
        other.zero_grad()
        assert torch.allclose(model.weight, twin.weight, atol=1e-6)
    assert (step.index, step.epoch) == (len(steps) - 1, pytest.approx(42 / 26))
    assert len(steps) == 7
    assert accelerator.gradient_accumulation_steps == 1
    assert accelerator.gradient_state.sync_with_dataloader


def test_gradients_of_a_step_that_was_broken_off_are_warned_of(accelerator):
    """As by the stop button of a notebook, between two micro-batches: the next loop would add to them."""
    model, optimizer = build(accelerator)

    def train(is_broken_off: bool) -> None:
        steps = exact_steps(accelerator, POINTS, stack, **SETTINGS)
        for step in itertools.islice(steps, 2):
            for batch in step:
                with accelerator.accumulate(model):
                    accelerator.backward(step.loss(squares(model, batch)[0]))
                    if is_broken_off:
                        return
                    optimizer.step()
                    optimizer.zero_grad()

    train(is_broken_off=True)
    with pytest.warns(
        UserWarning, match="the model has a gradient before the first step, as of one that was broken off"
    ):
        train(is_broken_off=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(is_broken_off=False)


def test_steps_go_on_where_they_were_and_can_be_prepared_ahead(accelerator, monkeypatch):
    """The same samples from any first step, from workers, and through pinned memory, in any nesting."""

    def batches(**more):
        steps = exact_steps(accelerator, POINTS, lambda samples: {"points": stack(samples)}, **settings, **more)
        return {step.index: [batch["points"][0].tolist() for batch in step] for step in unchecked(steps)}

    def unchecked(steps):
        for step in steps:
            step._is_first = False  # nothing is trained here
            yield step

    settings = SETTINGS | {"targets": lambda batch: len(batch["points"][0])}
    whole = batches(num_steps=6)
    assert list(whole) == list(range(6))
    assert batches(num_steps=6, first_step=4) == {number: whole[number] for number in (4, 5)}
    assert batches(num_steps=6, num_workers=1) == whole
    assert batches(num_steps=6, seed=1) != whole
    steps = exact_steps(accelerator, POINTS, lambda samples: {"points": stack(samples)}, **settings)
    with Watch(torch.Tensor.pin_memory, lambda _, tensor, *__: tensor + 1):
        (pinned, *_), (plain, *_) = steps._steps[0].pin_memory().micro_batches, steps._steps[0].micro_batches
    assert torch.equal(pinned["batch"]["points"][1], plain["batch"]["points"][1] + 1)


def test_terms_and_weights(accelerator):
    model, _ = build(accelerator)
    loader = [POINTS[0], POINTS[1]]

    def two(batch):
        return torch.tensor([2, 5])

    for step in exact_windows(accelerator, loader, gradient_accumulation_steps=2, targets=two):
        assert step.num_targets.tolist() == [4, 10]
        for x, _ in step:
            with accelerator.accumulate(model):
                sums = torch.stack([model(x).sum(), model(2 * x).sum()])
                loss = step.loss(sums, weights=[1.0, 0.5])
                assert loss.item() == pytest.approx(2 * (sums[0] / 4 + 0.5 * sums[1] / 10).item())
                accelerator.backward(loss)
        assert step.mean_loss().shape == (2,)


def test_per_sample_masks_depend_on_the_sample_alone():
    transformers = pytest.importorskip("transformers")
    tokenizer = tiny_tokenizer()
    collate = per_sample(transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4), seed=1)
    samples = [{"input_ids": list(range(5, 5 + n))} for n in (9, 4, 7)]
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    whole = collate(samples, [(0, 8), (0, 2), (0, 4)])
    assert torch.equal(torch.rand(1), expected)  # the noise of the model goes on as if nothing had been drawn
    alone = collate(samples[1:2], [(0, 2)])
    for name, value in alone.items():
        assert torch.equal(whole[name][1, :4], value[0])
    assert (whole["labels"][1, 4:] == -100).all()
    assert (whole["input_ids"][1, 4:] == tokenizer.pad_token_id).all()
    assert not torch.equal(collate(samples, [(1, 8), (1, 2), (1, 4)])["labels"], whole["labels"])
    with pytest.raises(UsageError, match="exact_steps"):
        collate(samples)


# ---------------------------------------------------------------------------------------------------------------------
# Wrong use


def refused(call, *parts: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


def take_step(accelerator, loss=lambda model, batch: squares(model, batch)[0], targets=SETTINGS["targets"], **more):
    model, optimizer = build(accelerator)
    for step in exact_steps(accelerator, POINTS, stack, **SETTINGS | {"targets": targets} | more):
        for batch in step:
            with accelerator.accumulate(model):
                accelerator.backward(step.loss(loss(model, batch)))
                optimizer.step()
                optimizer.zero_grad()
        return


def test_values_that_break_a_rule(accelerator):
    for data, name in ((Stream(), "Stream"), (DataLoader(POINTS), "DataLoader"), (iter(POINTS), "list_iterator")):
        refused(
            lambda data=data: exact_steps(accelerator, data, stack, **SETTINGS), f"dataset is a {name}", "exact_windows"
        )
    refused(lambda: exact_steps(accelerator, [], stack, **SETTINGS), "dataset is empty")
    for name in ("global_batch_size", "per_device_batch_size"):
        more = SETTINGS | {name: 8.0}
        refused(
            lambda more=more: exact_steps(accelerator, POINTS, stack, **more), "size is 8.0, must be a whole number"
        )
    refused(lambda: exact_steps(accelerator, POINTS, stack, **SETTINGS, num_epochs=1, num_steps=2), "num_steps is 2")
    refused(lambda: exact_steps(accelerator, POINTS, stack, **SETTINGS, num_steps=2, first_step=3), "first_step is 3")
    refused(lambda: exact_steps(accelerator, POINTS, stack, **SETTINGS, max_tokens=9), "max_tokens is 9", "length=")
    refused(lambda: exact_steps(accelerator, POINTS, None, **SETTINGS), "collate is NoneType")
    k = {"gradient_accumulation_steps": 2, "targets": len}
    refused(lambda: exact_windows(accelerator, iter(POINTS), **k, num_epochs=2), "num_epochs is 2", "DataLoader")
    refused(lambda: exact_windows(accelerator, POINTS, **k | {"gradient_accumulation_steps": 0}), "steps is 0")
    repeating = DataLoader(POINTS, sampler=DistributedSampler(POINTS, num_replicas=3, rank=0))
    refused(lambda: exact_windows(accelerator, repeating, **k), "repeats 1 of 26", "leave it out")
    refused(lambda: evaluate(accelerator, nn.Linear(4, 1), [], squares), "data has no sample")


def test_an_accelerator_that_would_make_steps_wrong(accelerator, monkeypatch):
    accelerator.gradient_accumulation_steps = 4
    refused(lambda: take_step(accelerator), "gradient_accumulation_steps of the Accelerator is 4", "Accelerator()")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    refused(lambda: take_step(accelerator), "unset ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    accelerator.gradient_accumulation_steps = 1
    steps = exact_steps(accelerator, POINTS, stack, **SETTINGS)
    _, optimizer = build(accelerator)
    accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
    refused(lambda: next(iter(steps)), "scheduler is prepared", "Leave it out of accelerator.prepare")


@pytest.mark.parametrize(
    "value", [torch.tensor(2.0).half(), torch.tensor([[2]]), torch.tensor([True]), True, None, torch.tensor(2j), "2"]
)
def test_targets_that_are_no_numbers_of_targets(accelerator, value):
    refused(lambda: take_step(accelerator, targets=lambda batch: value), "targets returned", "int tensor")


def test_targets_that_cannot_be(accelerator):
    refused(lambda: take_step(accelerator, targets=lambda batch: 0), "targets counted [0] in the whole first step")
    refused(lambda: take_step(accelerator, targets=lambda batch: -1), "-1", "negative")
    refused(lambda: take_step(accelerator, targets=lambda batch: torch.tensor(-0.5)), "-0.5", "negative")
    refused(lambda: take_step(accelerator, targets=lambda batch: math.nan), "nan", "finite")
    refused(lambda: take_step(accelerator, targets=lambda batch: torch.tensor([math.inf])), "inf", "finite")
    refused(
        lambda: take_step(accelerator, squares, targets=lambda batch: 3), "the loss counts [2]", "targets counts [3]"
    )


def test_a_mean_is_found_in_the_first_step(accelerator):
    refused(lambda: take_step(accelerator, lambda m, b: F.mse_loss(m(b[0]), b[1])), "a mean (MseLoss", "reduction")
    refused(lambda: take_step(accelerator, lambda m, b: squares(m, b)[0] / 6), "divided by 6")
    refused(lambda: take_step(accelerator, lambda m, b: squares(m, b)[0][None]), "given [1]", "returns []")
    take_step(accelerator, lambda m, b: F.mse_loss(m(b[0]), b[1]) * len(b[0]))


def test_what_is_a_mean():
    """Of 5 targets: reductions, means by hand, and sums that look like means."""
    x, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, -100, 1])
    logits = nn.Linear(4, 3)(x)
    losses, is_target = F.cross_entropy(logits, labels, reduction="none"), labels != -100
    total = F.cross_entropy(logits, labels, reduction="sum")
    means = [
        *(
            F.cross_entropy(logits, labels),
            F.cross_entropy(logits, labels, label_smoothing=0.1),
            losses.mean(),
            losses.mean(0),
        ),
        *((losses * is_target).sum() / is_target.sum(), total / 5, 0.5 * F.cross_entropy(logits, labels)),
        *(F.mse_loss(logits, x[:, :3]), F.binary_cross_entropy_with_logits(logits, x[:, :3].sigmoid())),
    ]
    assert all(find_mean(mean, [[5]]) for mean in means)
    assert find_mean(torch.stack([total, total / 5]), [[7], [5]])
    pictures = F.mse_loss(logits, x[:, :3], reduction="none").mean(1).sum()
    sums = [
        total,
        losses.sum(),
        total * 0.5,
        F.cross_entropy(logits, labels) * is_target.sum(),
        pictures,
        (losses * is_target).sum(),
    ]
    assert not any(find_mean(loss, [[5]]) for loss in sums)
    assert not find_mean(torch.stack([total, total / 5]), [[5], [7]])
    assert not find_mean(total / 2, [[2]])  # half the squared error of two samples


def test_loops_that_leave_something_out(accelerator):
    model, optimizer = build(accelerator)

    def skip_accumulate():
        for step in exact_steps(accelerator, POINTS, stack, **SETTINGS):
            for batch in step:
                accelerator.backward(step.loss(squares(model, batch)))
                optimizer.step()

    def skip_loss():
        for step in exact_steps(accelerator, POINTS, stack, **SETTINGS):
            for batch in step:
                with accelerator.accumulate(model):
                    accelerator.backward(squares(model, batch)[0])

    refused(skip_accumulate, "accumulate was entered 0 times for 1 micro-batch")
    refused(skip_loss, "step.loss was not called")
    step = next(iter(exact_steps(accelerator, POINTS, stack, **SETTINGS)))
    refused(lambda: step.loss(torch.zeros(())), "outside its loop")


def test_public_names_have_homes():
    import importlib.util

    for name, home in samestep._HOMES.items():
        if importlib.util.find_spec(home):
            assert getattr(samestep, name).__name__ == name
    with pytest.raises(AttributeError):
        samestep.exact_step  # noqa: B018
