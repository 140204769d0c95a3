"""A batch that grows: the same stream of samples, cut elsewhere; the learning rate by samples; resumed anywhere."""

import dataclasses
import itertools
import json
import math
import random

import numpy as np
import pytest
from common import all_metrics, metrics
from compare import parameters, relative
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.contrib.growing.step_plan import plan_steps
from samestep.cut.order import Order
from samestep.cut.spans import Spans
from samestep.errors import UsageError
from samestep.recipe.catalog import load


def small(schedule: str | None, batch: int = 64, **changes):
    """Load a recipe of one batch, 16 to 64, whose learning rate knows no other batch."""
    changes = {"lr_scaling_rule": "none", "global_batch_size": batch} | changes
    return load("gpt2_small_cpu", changes | {"batch_schedule": schedule})


# ---------------------------------------------------------------------------------------------------------------------
# The stream of samples


def simulate(n: int, epoch_end: str, stages: list[tuple[int, int]], num_steps: int) -> list[tuple[int, int]]:
    """Go through the steps one by one."""
    place, spans = 0, []
    while len(spans) < num_steps:
        size = next(size for first, size in reversed(stages) if first <= place)
        end = (place // n + 1) * n
        if epoch_end == "drop" and place + size > end:
            place = end
            continue
        last = place + size if epoch_end == "carry" else min(place + size, end)
        spans.append((place, last))
        place = last
    return spans


@st.composite
def growths(draw):
    n = draw(st.integers(3, 60))
    sizes = sorted(draw(st.sets(st.integers(1, n), min_size=1, max_size=5)))
    places = sorted(draw(st.sets(st.integers(1, 200), min_size=len(sizes) - 1, max_size=len(sizes) - 1)))
    return n, draw(st.sampled_from(["carry", "keep", "drop"])), [*zip([0, *places], sizes, strict=True)]


@settings(deadline=None)
@given(growths())
def test_steps_lie_where_a_loop_puts_them(growth):
    n, epoch_end, stages = growth
    spans, expected = Spans(n, epoch_end, tuple(stages)), simulate(n, epoch_end, stages, 120)
    if epoch_end == "drop":  # `find_size` is asked of steps only, and a place that is left out begins none
        stages = [stage for stage in stages if stage[0] <= expected[-1][0]]
    assert [spans.find(step) for step in range(120)] == expected
    for end in (0, 1, n - 1, n, n + 1, 77, 150):
        if end < expected[-1][0]:
            assert spans.count(end) == sum(first < end for first, _ in expected)
    sizes = [size for number, size in spans.list_sizes(120) for _ in range(number)]
    assert sizes == [spans.find_size(step) for step in range(120)]
    if epoch_end != "keep":
        assert sizes == [last - first for first, last in expected]


@settings(max_examples=30, deadline=None)
@given(growths(), st.integers(0, 2**32))
def test_the_stream_is_that_of_one_batch(growth, seed):
    n, epoch_end, stages = growth
    if epoch_end == "drop":  # leaves out other samples
        epoch_end = "carry"
    growing = Order(n, stages[-1][1], seed, epoch_end, stages=tuple(stages))
    constant = Order(n, stages[-1][1], seed, epoch_end)

    def stream(order, number):
        parts = [order.samples(step) for step in range(number)]
        return [np.concatenate(columns) for columns in zip(*parts, strict=True)]

    ours, usual = stream(growing, 40), stream(constant, 40)
    length = min(len(ours[0]), len(usual[0]))
    assert all(np.array_equal(a[:length], b[:length]) for a, b in zip(ours, usual, strict=True))
    step = random.Random(seed).randrange(40)  # any step at once, in a new object
    again = dataclasses.replace(growing).samples(step)
    assert all(np.array_equal(a, b) for a, b in zip(again, growing.samples(step), strict=True))


def test_a_step_of_a_long_training_is_found_at_once():
    stages = tuple((number * 10**9, 16 + 16 * number) for number in range(64))
    order = Order(10**8, 1024, seed=1, stages=stages)
    step = order.spans.count(63 * 10**9 + 10**15)
    epochs, ids = order.samples(step)
    assert len(ids) == len(set(ids.tolist())) == 1024
    assert epochs[0] == (63 * 10**9 + 10**15) // 10**8


# ---------------------------------------------------------------------------------------------------------------------
# What a recipe says


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("16 64", "written like"),
        ("64", "written like"),
        ("16, 64", "written like"),
        ("16, 64 at", "written like"),
        ("16, 64 at -1", "written like"),
        ("16.5, 64 at 0.5", "written like"),
        ("0, 64 at 0.5", "written like"),
        ("32, 16 at 0.2, 64 at 0.5", "that grow"),
        ("16, 32 at 0.5, 64 at 0.2", "one after the other"),
        ("16, 64 at 0", "later than at 0"),
        ("16, 64 at 1", "below 1"),
        ("16, 64 at 200 %", "below 1"),
        ("16, 64 at 0.5 samples", "whole numbers"),
        ("16, 32 at 0.5, 64 at 100 samples", "all shares, all samples"),
        ("16, 64 at 0.5, rate by cube", "sqrt or linear"),
        ("power 0 from 16", "from 0.01"),
        ("power 0.5 from 64", "global_batch_size 64"),
        ("seesaw from 100", "global_batch_size 64"),
        ("16, 32 at 0.5", "set it to 32"),
        ("seesaw from 16, rate by sqrt", "seesaw has no 'rate'"),
        ("noise 2 from 16", "from 0.001 to 1"),
        ("noise 0.1 from 16", "num_train_epochs"),
    ],
)
def test_nonsense_is_refused_in_a_line(text, words):
    with pytest.raises(UsageError) as error:
        small(text)
    (problem,) = error.value.problems
    assert "batch_schedule" in problem
    assert words in problem
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"lr_scaling_rule": "sqrt"}, "lr_scaling_rule"),
        ({"lr_num_steps": 1000}, "lr_num_steps"),
        ({"lr_scheduler_type": "constant"}, "lr_scheduler_type"),
    ],
)
def test_fields_that_it_excludes(changes, field):
    with pytest.raises(UsageError, match=f"batch_schedule is 'seesaw from 16'.*{field}"):
        small("seesaw from 16", **changes)


def test_tokens_need_samples_of_one_length():
    assert plan_steps(small("16, 64 at 128000 tokens"), 500).stages == ((0, 16), (1000, 64))
    with pytest.raises(UsageError, match="different numbers of tokens"):
        small("16, 64 at 128000 tokens", packing=False)


def test_sizes_of_a_power():
    plan = plan_steps(small("power 0.5 from 16", max_train_steps=None, num_train_epochs=2), 5000)
    assert plan.num_samples == 10_000
    for first, size in plan.stages[1:]:
        assert 64 * ((first - 1) / 10_000) ** 0.5 < size <= 64 * (first / 10_000) ** 0.5 + 1e-9
    assert plan.spans.find(plan.num_steps - 1)[0] < 10_000 <= plan.spans.find(plan.num_steps)[0]


@pytest.mark.parametrize("epoch_end", ["carry", "keep", "drop"])
def test_lengths_in_steps_and_in_epochs_agree(epoch_end):
    """As many steps as max_train_steps says, and the same plan from epochs that need so many."""
    by_steps = plan_steps(small("16, 32 at 0.25, 64 at 0.5", max_train_steps=200, epoch_end=epoch_end), 700)
    assert by_steps.num_steps == 200
    assert sum(number for number, _ in by_steps.sizes) == 200
    epochs = by_steps.num_samples / 700
    changes = {"max_train_steps": None, "num_train_epochs": epochs, "epoch_end": epoch_end}
    by_epochs = plan_steps(small("16, 32 at 0.25, 64 at 0.5", **changes), 700)
    assert abs(by_epochs.num_steps - 200) <= 1
    assert len(by_steps.stages) == len(by_epochs.stages) == 3


@pytest.mark.parametrize("kind", ["cosine", "linear", "warmup_stable_decay", "warmup_stable_sqrt_decay"])
def test_seesaw_keeps_what_a_decay_changes(kind):
    """The learning rate over the root of the batch is that of the constant batch after as many samples; steps are fewer."""
    changes = {"lr_scheduler_type": kind, "max_train_steps": None, "num_train_epochs": 1.6, "num_warmup_steps": 20}
    recipe = small("seesaw from 16", **changes)
    plan, usual = plan_steps(recipe, 5000), small(None, 16, **changes).schedule(500, 312.5)
    sizes = [plan.spans.find_size(step) for step in range(plan.num_steps)]
    assert sizes == sorted(sizes)
    assert sizes[:20] == [16] * 20
    assert sizes[-1] == 64
    for step, size in enumerate(sizes):
        first, _ = plan.spans.find(step)
        rate = usual.find_ratio(first / 16) * usual.peak if step >= 20 else usual(step)
        assert plan.schedule(step) / math.sqrt(size) == pytest.approx(rate / 4, rel=1e-9)
        if size < 64:
            assert size <= 16 / usual.find_ratio(first / 16) * (1 + 1e-9)
    assert plan.num_steps < 500
    if kind == "cosine":  # r = (1 + cos pi x) / 2 is at least 1/4 for two thirds; its integral over them, and 1/3 x 1/4
        assert 0 < (plan.num_steps - 20) / 480 - (1 / 3 + math.sin(math.pi / 3) / (2 * math.pi) + 1 / 12) < 0.02


def test_sgd_keeps_its_learning_rate_while_seesaw_grows():
    recipe = load("resnet_digits_cpu", {"batch_schedule": "seesaw from 16", "global_batch_size": 128, "optimizer": "sgd",
                                        "sgd_momentum": 0.9, "adam_beta1": None, "adam_beta2": None, "adam_epsilon": None,
                                        "lr_scaling_rule": "none", "lr_scheduler_type": "linear"})  # fmt: skip
    plan = plan_steps(recipe, recipe.num_train_samples)
    rates = [plan.schedule(step) for step in range(plan.schedule.num_warmup_steps, plan.num_steps)]
    sizes = [plan.spans.find_size(step) for step in range(plan.schedule.num_warmup_steps, plan.num_steps)]
    falling = [rate for rate, size in zip(rates, sizes, strict=True) if size < 128]
    assert len(set(sizes)) > 5
    assert min(falling) > 0.85 * max(falling)


def test_the_learning_rate_of_one_size_is_that_of_steps():
    """Bit by bit: a stage that never comes changes nothing."""
    recipe = small("16, 64 at 999999 samples", max_train_steps=300, num_warmup_steps=30)
    plan, usual = plan_steps(recipe, 1000), small(None, 16, max_train_steps=300, num_warmup_steps=30)
    schedule = usual.schedule(300, 62.5)
    assert [plan.schedule(step) for step in range(300)] == [schedule(step) for step in range(300)]
    assert plan.schedule.num_warmup_steps == 30
    same = {"max_train_steps": 300, "num_warmup_steps": 30, "learning_rate_batch_size": 16}
    rates = [
        plan_steps(small(f"16, 64 at 1600 samples{rate}", **same), 1000).schedule(150)
        for rate in (", rate by sqrt", "")
    ]
    assert rates[0] == pytest.approx(2 * rates[1])


def test_the_plan_knows_its_steps_and_hours():
    from stepplan.hardware import parse as parse_hardware
    from stepplan.placement import place
    from stepplan.workload import from_recipe

    constant, growing = (
        from_recipe(small(schedule, batch, **changes))
        for schedule, batch, changes in (
            (None, 64, {"max_train_steps": 200}),
            ("16, 64 at 0.5", 64, {"max_train_steps": 200}),
        )
    )
    assert growing.num_steps == 200
    assert growing.num_samples == sum(number * size for number, size in growing.sizes) < constant.num_samples
    hardware = parse_hardware("1xt4")
    hours = [place(each, hardware).seconds_to_end / each.num_samples for each in (constant, growing)]
    assert 1 <= hours[1] / hours[0] < 2, "small steps are not free"
    assert place(constant, hardware).memory == place(growing, hardware).memory


# ---------------------------------------------------------------------------------------------------------------------
# Runs

FLAGS = " --lr_scaling_rule none --global_batch_size 16 --max_train_steps 10"
GROWTHS = {
    "stages": "4, 7 at 0.2, 16 at 0.5, rate by sqrt",
    "power": "power 0.7 from 3",
    "seesaw": "seesaw from 5",
    "noise": "noise 0.5 from 4",
}


@pytest.fixture
def growing(tmp_path):
    """Write the recipes of `GROWTHS`: growing("power") -> the flags that name one."""

    def write(kind: str) -> str:
        file = tmp_path / f"{kind}.yaml"
        values = {"extends": "gpt2_small_cpu", "batch_schedule": GROWTHS[kind], "lr_scaling_rule": "none"}
        file.write_text(json.dumps(values | {"global_batch_size": 16}))
        return f" --recipe {file}{FLAGS}"

    return write


@pytest.mark.parametrize("kind", ["stages", "seesaw"])
def test_a_run_resumes_anywhere(train, growing, kind):
    """From a random step on, in other micro-batches: the same curve; what the log, the plan and the settings say is true."""
    flags, options = growing(kind), {"program": "pretrain_gpt2"}
    whole = train("whole", flags, **options)
    stop = random.Random(kind).randrange(2, 9)
    train("parts", f"{flags} --per_device_train_batch_size 3 --stop_after_step {stop}", **options)
    parts = train("parts", f"{flags} --per_device_train_batch_size 5 --resume_from_checkpoint latest", **options)
    ours, usual = metrics(parts), metrics(whole)
    assert len(usual) == len(ours) == 10
    for name in ("loss", "grad_norm", "learning_rate", "epoch", "samples", "tokens"):
        assert [line[name] for line in ours] == pytest.approx([line[name] for line in usual], rel=1e-5, abs=1e-9)
    assert relative(parameters(parts), parameters(whole)) < 1e-4
    sizes = json.loads((whole / "settings.json").read_text())["batch_sizes"]
    assert [line["samples"] for line in usual] == [size for number, size in sizes for _ in range(number)]
    assert usual[0]["samples"] < usual[-1]["samples"]
    ends = list(itertools.accumulate(line["samples"] for line in usual))
    number = json.loads((whole / "all_results.json").read_text())["train_samples"]
    assert [line["epoch"] for line in usual] == pytest.approx([end / number for end in ends])


@pytest.mark.distributed
def test_bits_do_not_depend_on_the_processes(train, train_on, growing):
    """--reproducible: what more processes go on with has the digests of one process, dropout on, idle processes too."""
    more = " --reproducible 2 --digest_steps 1 --resid_pdrop 0.1"
    flags, options = growing("power") + more, {"program": "pretrain_gpt2"}
    whole = train("whole", flags, **options)
    start = train("start", f"{flags} --stop_after_step 1", **options)
    name = "pretrain_gpt2/on3"
    folder = train_on(3, {name: f"{flags} --resume_from_checkpoint {start}/checkpoint-1"})
    ours, usual = metrics(folder / name), metrics(whole)
    assert [line["step"] for line in ours] == list(range(2, 11))
    assert [line["digest"] for line in ours] == [line["digest"] for line in usual[1:]]


def test_a_batch_follows_the_noise(train, growing, capsys):
    """It grows by what was measured; goes on from any checkpoint as before; and the stages that it notes repeat the run."""
    options = {"program": "pretrain_gpt2"}
    flags = growing("noise").replace(
        "--max_train_steps 10", "--max_train_steps none --num_train_epochs 0.6 --warmup_ratio 0"
    )
    flags += " --reproducible 2 --noise_scale_steps 1 --digest_steps 1 --checkpointing_steps 5"
    whole = train("whole", flags, **options)
    usual = metrics(whole)
    sizes = [line["samples"] for line in usual]
    assert sizes == sorted(sizes)
    assert 4 == sizes[0] < sizes[-1] <= 16
    length = json.loads((whole / "all_results.json").read_text())["train_samples"]
    assert sum(sizes[:-1]) < 0.6 * length <= sum(sizes), "as many samples as the epochs have"
    events = [line for line in all_metrics(whole) if line.get("event", "").startswith("the batch grows")]
    assert len(events) == len(set(sizes)) - 1
    assert json.loads((whole / "settings.json").read_text())["num_steps"] == len(sizes) == events[-1]["num_steps"]
    resumed = metrics(train("resumed", f"{flags} --resume_from_checkpoint {whole}/checkpoint-5", **options))
    assert [line["digest"] for line in resumed] == [line["digest"] for line in usual[5:]]
    stages = {"extends": "gpt2_small_cpu", "batch_schedule": events[-1]["so_far"], "global_batch_size": sizes[-1]}
    (whole.parent / "noise.yaml").write_text(json.dumps(stages | {"lr_scaling_rule": "none"}))
    flags = flags.replace("--global_batch_size 16", f"--global_batch_size {sizes[-1]}")
    repeated = metrics(train("repeated", flags, **options))
    assert [line["digest"] for line in repeated] == [line["digest"] for line in usual]


# ---------------------------------------------------------------------------------------------------------------------
# A finished training goes on from its stable part

STABLE = " --lr_scheduler_type warmup_stable_decay --lr_decay_ratio 0.3 --warmup_ratio none --num_warmup_steps 2"


def test_a_finished_training_goes_on_from_its_stable_part(train, capsys, tmp_path):
    """Longer, with another decay, and with a batch that grows from there on: each as if it had been so from the start."""
    options = {"program": "pretrain_gpt2"}
    flags = f"{STABLE} --checkpointing_steps 3 --lr_scaling_rule none"
    first = train("first", flags, **options)
    (tmp_path / "growing.yaml").write_text(
        json.dumps({"extends": "gpt2_small_cpu", "batch_schedule": "16, 32 at 112 samples"})
    )
    grown = f" --recipe {tmp_path / 'growing.yaml'} --global_batch_size 32"
    changes = {
        "longer": " --max_train_steps 14",
        "root": " --lr_scheduler_type warmup_stable_sqrt_decay --lr_decay_ratio 0.2 --max_train_steps 12",
        "grown": f"{grown} --max_train_steps 10",
    }
    for name, change in changes.items():
        capsys.readouterr()
        resumed = f"{flags}{change} --resume_from_checkpoint {first}/checkpoint-6"
        ours = metrics(train(name, resumed, **options))
        out = capsys.readouterr().out
        assert "going on from step 6 of a training of 10" in out
        anew = metrics(train(f"{name}-anew", flags + change, **options))
        assert [line["step"] for line in ours] == [line["step"] for line in anew[6:]]
        for field in ("loss", "learning_rate", "samples"):
            assert [line[field] for line in ours] == pytest.approx([line[field] for line in anew[6:]], rel=1e-5)
    with pytest.raises(
        UsageError, match=r"part from this one's after step 8: max_train_steps 10 there, 14 here.*checkpoint-6 is"
    ):
        train("late", f"{flags} --max_train_steps 14 --resume_from_checkpoint {first}/checkpoint-10", **options)
    early = {"extends": "gpt2_small_cpu", "batch_schedule": "16, 32 at 96 samples"}
    (tmp_path / "growing.yaml").write_text(json.dumps(early))
    late = f"{flags}{grown} --max_train_steps 10"
    with pytest.raises(UsageError, match=r"after step 6: .*batch_schedule"):
        train("early", f"{late} --resume_from_checkpoint {first}/checkpoint-9", **options)
