"""benchmarks/bench.py and chats.py: the arithmetic of stamps and turns, what is written, and one step of peers."""

import doctest
import importlib
import json
import math
import shlex
import statistics

import numpy as np
import pytest
import torch
from common import ROOT, TINIES, fresh_accelerator, load_script, model_of, task_of, tiny_argv
from torch.utils.flop_counter import FlopCounterMode

from samestep.cut.order import Order
from samestep.data import sentence_pairs
from samestep.data.ragged import make_micro_batch
from samestep.data.steps import Steps
from samestep.models import bert_pretraining, causal_lm, text_classification
from samestep.recipe import run_settings as run
from samestep.recipe.catalog import load
from samestep.training import launch, report


@pytest.fixture
def module(monkeypatch):
    """Load modules of benchmarks/ and benchmarks/peers/ by name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "peers")
    return importlib.import_module


@pytest.fixture
def bench(module):
    return module("bench")


# ---------------------------------------------------------------------------------------------------------------------
# Stamps and turns


def test_a_stamp_is_read_as_it_was_written(module, tmp_path):
    clock = module("clock")
    assert clock.read(tmp_path / "none") == (None, [])
    writer = clock.Clock(tmp_path / "stamps")
    for units in (3, 4, 5):
        writer.collated(units)
    writer.step(1.5, num_batches=2)
    writer.step(math.pi)
    with (tmp_path / "stamps").open("a") as file:
        file.write("123.4 5")  # is being written
    process, stamps = clock.read(tmp_path / "stamps")
    assert process > 0
    assert [(stamp.units, stamp.loss) for stamp in stamps] == [(7, 1.5), (5, 3.14159)]
    assert stamps[0].time <= stamps[1].time


def test_steps_that_straddle_a_border_are_not_counted(bench):
    # Turns [0, 10] and [20, 30]; the step that ends at 22 began in the first turn, the one that ends at 51 in the second.
    stamps = [
        bench.Stamp(time, units, 0.0) for time, units in [(2, 100), (5, 30), (9, 40), (22, 999), (24, 8), (51, 9)]
    ]
    assert bench.rate(stamps, (0, 10)) == pytest.approx((30 + 40) / (9 - 2))
    assert bench.rate(stamps, (20, 30)) == pytest.approx(8 / (24 - 22))


def test_running_time_is_the_time_of_its_turns(bench, module):
    turns = [(0.0, 10.0), (20.0, 30.0), (50.0, 51.0)]
    running_time = module("harness").running_time
    assert [running_time(turns, time) for time in (4, 10, 15, 22, 60)] == [4, 10, 10, 12, 21]
    stamps = [bench.Stamp(time, 1, 0.0) for time in (5, 8, 21, 25)]
    assert bench.step_seconds(stamps, turns) == 3  # of 3, 2 + 1, 4


def test_time_to_the_loss_that_all_reached(bench):
    stamps = {
        "ours": [bench.Stamp(time, 1, loss) for time, loss in enumerate([9, 5, 3, 1, 1])],
        "slow": [bench.Stamp(10 + 2 * time, 1, loss) for time, loss in enumerate([9, 5, 3])],
    }
    turns = {"ours": [(0, 2), (7, 9)], "slow": [(10, 20)]}
    times = bench.times_to_loss(stamps, turns, window=2)
    assert times["loss"] == 4
    assert times["programs"] == {
        "ours": {"seconds": 2, "training": 2, "steps": 3},
        "slow": {"seconds": 4, "training": 4, "steps": 3},
    }
    assert bench.times_to_loss({"ours": stamps["ours"], "slow": stamps["slow"][:1]}, turns) is None


# ---------------------------------------------------------------------------------------------------------------------
# What is written


def row(workload: str, precision: str, **more) -> dict:
    rates = {"ours": [100.0, 120.0, 90.0], "Trainer": [50.0, 40.0, 60.0], "floor": [125.0, 120.0, 100.0]}
    data = {"samples": 1234, "pieces": 99, "mean_length": 61.2, "padding": 0.385, "longest": 0.1, "products": 1.5}
    values = {"workload": workload, "precision": precision, "unit": "token", "data": data, "rates": rates}
    values["turn"] = dict.fromkeys(rates, 3.0)
    values |= {"memory": {"ours": 1.0, "Trainer": 2.346, "floor": 0.5}, "to_loss": None}
    return values | {"command": "python benchmarks/bench.py", "machine": "a machine"} | more


def test_the_tables(bench, tmp_path, real_figures):
    to_loss = {"loss": 7.5, "programs": {"ours": {"seconds": 61.4, "training": 40.2, "steps": 33}}}
    log = "kernels: sdpa, oneDNN (--speed auto)\n  0%| | 0/9 [?s]micro-batches: at most 64 tokens at once (--speed auto)\n"
    rows = [row("gpt2", "no", chosen=bench.read_choices(log)), row("classifier", "bf16", to_loss=to_loss)]
    del rows[1]["rates"]["Trainer"], rows[1]["memory"]["Trainer"]
    lines = bench.markdown({"rows": rows}).splitlines()
    assert "| workload | precision | ours, per second | ours / Trainer | ours / floor |" in lines
    ours, floor = "100 (90 to 120) tokens", "0.90 (0.80 to 1.00)"
    assert f"| gpt2 | no | {ours} | 2.00 (1.50 to 3.00) | {floor} |" in lines
    assert f"| classifier | bf16 | {ours} | - | {floor} |" in lines
    assert "| gpt2 | no | 1.00 | 2.35 | 0.50 |" in lines
    assert "| classifier | bf16 | 7.500 | 61 (40; 33) | - | - |" in lines
    assert [line for line in lines if "sdpa, " in line] == ["| gpt2 | no | sdpa, oneDNN | at most 64 tokens at once |"]
    assert any(line.startswith("| gpt2 | 1,234 of 61 tokens in the mean, 10% of the greatest") for line in lines)
    assert lines[-1] == "`python benchmarks/bench.py`: a machine"
    bench.draw(rows, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_line_through_micro_steps(module):
    linear = module("linear")
    a, b, errors = linear.deviations([1, 2, 4, 8], [0.3, 0.5, 0.9, 1.7])
    assert (a, b) == (pytest.approx(0.1), pytest.approx(0.2))
    assert errors == pytest.approx([0, 0, 0, 0], abs=1e-9)
    _, _, errors = linear.deviations([1, 2, 4, 8], [0.3, 0.55, 0.9, 1.7])
    assert max(errors, key=abs) == errors[1] > 0.03, "10 % too slow, most of it seen"
    rows = [{"precision": "no", "seconds": {1: [0.3, 0.2], 2: [0.5, 0.4]}, "memory": {1: 1.0, 2: 1.25}}]
    rows[0] |= {"a": 0.1, "b": 0.2, "off": {1: [0.01, 0.02], 2: [-0.02, -0.04]}}
    text = linear.markdown({"rows": rows, "about": {"command": "make bench NAME=linear"}})
    assert "| no | 2 | 0.450 (0.400 to 0.500) | -3.0% (-4.0% to -2.0%) | 1.25 |" in text
    assert "no 0.1000 + 0.2000 k seconds" in text


def test_steps_are_timed_without_the_turns_of_others(module, tmp_path):
    linear, now = module("linear"), [100.0]

    class Steady:
        """Takes so many seconds for every step."""

        def __init__(self, file, seconds):
            self.file, self.seconds, self.elapsed, self.turns = file, seconds, 0.0, []
            file.write_text("1\n")

        def turn(self, seconds):
            begin, done = now[0], int(self.elapsed / self.seconds + 1e-9)
            self.elapsed, now[0] = self.elapsed + seconds, begin + seconds
            self.turns.append((begin, now[0]))
            with self.file.open("a") as lines:
                for step in range(done + 1, int(self.elapsed / self.seconds + 1e-9) + 1):
                    lines.write(f"{now[0] - (self.elapsed - step * self.seconds)} 1 0.5\n")

    costs = {1: 0.3, 4: 1.7, 8: 3.1}
    programs = {k: (Steady(tmp_path / str(k), seconds), tmp_path / str(k)) for k, seconds in costs.items()}
    for program, _ in programs.values():
        program.turn(4.0)  # has taken a step, and a part of another
    for _ in range(2):
        assert linear.take_round(programs) == pytest.approx(costs)


def test_every_number_of_micro_steps_has_a_recipe(module, tmp_path):
    linear = module("linear")
    for k in linear.NUM_MICRO_STEPS:
        (tmp_path / "recipe.yaml").write_text(json.dumps(linear.recipe(k)))
        recipe = load(str(tmp_path / "recipe.yaml"))
        assert recipe.global_batch_size == 8 * k
        assert recipe.scaled_hyperparameters().adam_beta1 == recipe.adam_beta1


@pytest.mark.parametrize("program", TINIES)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_loaders_are_compared_with_their_models(module, corpus, tmp_path, after_forward, program, precision):
    loader, task, outputs = module("loader"), task_of(program), []
    recipe, _ = run.parse(tiny_argv(program, corpus, tmp_path, "--global_batch_size 4"), task, "")

    def watch(model, output, **_):
        outputs.append(output[0])
        if hasattr(model, "bert"):
            assert model.bert.config._attn_implementation == "unpadded_eager", (
                "others would see all samples of a micro-batch"
            )

    after_forward(model_of(program), watch)
    row = loader.speed("a title", recipe, num_steps=1, rounds=2, precision=precision)
    assert len(outputs) == 3, "a warm-up and two rounds of one step in one micro-batch"
    assert all(len(sums) == len(recipe.loss_weights) and sums.isfinite().all() for sums in outputs)
    assert row["ratio"] == statistics.median(row["ratios"]) > 0


@pytest.mark.parametrize(
    "task", ["bert_pretraining", "gpt2_pretraining", "text_classification", "image_classification"]
)
def test_workloads_are_recipes(bench, tmp_path, task):
    """Of every task, and endless."""
    (tmp_path / "resnet18_photographs.yaml").write_text("extends: resnet50_imagenet_4xt4\nnum_labels: 2\n")
    folders = [
        bench.harness.write_recipe(tmp_path / name, workload.values | bench.ENDLESS)
        for name, workload in bench.WORKLOADS.items()
    ]
    recipes = [load(str(folder / "recipe.yaml")) for folder in folders]
    task_recipes = [recipe for recipe in recipes if recipe.task == task]
    assert task_recipes
    assert all(recipe.max_train_steps == 10**6 and recipe.num_warmup_steps == 20 for recipe in task_recipes)
    assert not any("WORK" in json.dumps(recipe.train_file) for recipe in task_recipes if hasattr(recipe, "train_file"))


# ---------------------------------------------------------------------------------------------------------------------
# The peers


@pytest.fixture
def folder(module, corpus, tmp_path, monkeypatch):
    """Prepare the tiny BERT of the tests as a workload."""
    argv = tiny_argv("pretrain_bert", corpus, tmp_path, "--global_batch_size 8 --num_warmup_steps 1 --seed 3")
    recipe, _ = run.parse(argv, "bert_pretraining", "")
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    numbers = module("workloads").prepare(tmp_path)
    assert 0 < numbers["padding"] < 1
    assert numbers["mean_length"] < 48
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("peer", "sampling"),
    [("trainer", []), ("trainer", ["batch_rebalance"]), ("accelerate_loop", []), ("lightning_loop", [])],
)
def test_a_peer_counts_the_tokens_of_its_steps(module, folder, peer, sampling):
    """Every stamp holds what the model saw in that step, whatever was loaded ahead."""
    clock, calls = module("clock"), []
    stamps = clock.Clock("stamps")
    work = module("workloads").build(folder, "eager", stamps)
    work.model.register_forward_pre_hook(lambda _, args, batch: calls.append(batch["attention_mask"]), with_kwargs=True)
    fresh_accelerator()
    module(peer).train(work, "no", stamps, 3, *sampling)
    k = len(calls) // 3
    assert k == (4 if sampling else 1)
    masks = [calls[k * step : k * step + k] for step in range(3)]
    stamped = clock.read(folder / "stamps")[1]
    assert [stamp.units for stamp in stamped] == [sum(int(mask.sum()) for mask in step_masks) for step_masks in masks]
    assert [sum(map(len, step_masks)) for step_masks in masks] == [8, 8, 8]
    assert stamped[0].loss == pytest.approx(math.log(600) + math.log(2), rel=0.1)


def test_products_are_those_that_torch_counts(module, folder):
    """Of a sample, forward."""
    recipe = load(str(folder / "recipe.yaml"))
    source, _ = sentence_pairs.build(recipe)
    sample = max((source.draw(0, place) for place in range(20)), key=lambda sample: sample.length)
    bert, micro_batch = bert_pretraining.build_model(recipe), source.collate([sample])
    bert.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as theirs:
        bert(micro_batch["input_ids"][:, : sample.length])
    micro_batch.pop("counts")
    with FlopCounterMode(display=False) as ours:
        bert_pretraining.PretrainingSums(bert)(**micro_batch)
    ratio = theirs.get_total_flops() / ours.get_total_flops()
    assert module("workloads").products(recipe, np.array([sample.length])) == pytest.approx(ratio, rel=0.03)


def test_products_of_a_classifier_are_those_that_torch_counts(module):
    recipe = load("finetune_small_cpu")
    bert = text_classification.build_model(recipe, ["a", "b"])
    micro_batch = make_micro_batch([np.arange(64)], [64], [np.zeros(1, int)])
    bert.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as theirs:
        bert(micro_batch["input_ids"])
    with FlopCounterMode(display=False) as ours:
        text_classification.ClassificationSums(bert)(**micro_batch, labels=torch.zeros(1, dtype=torch.int64))
    ratio = theirs.get_total_flops() / ours.get_total_flops()
    assert module("workloads").products(recipe, np.array([64])) == pytest.approx(ratio, rel=0.01)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_floor_takes_our_steps(module, folder, monkeypatch, precision):
    """The first step's loss and tokens are those of our script, and further steps are taken."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    clock, recipe = module("clock"), load(str(folder / "recipe.yaml"))
    script = load_script("pretrain_bert")
    argv = shlex.split("--recipe recipe.yaml --speed safe --stop_after_step 2 --output_dir")
    for owner, name in ((report.RunLog, "end_step"), (launch, "prepare"), (Steps, "stream")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # undone after the test
    fresh_accelerator()
    module("ours").stamp(clock.Clock("ours.stamps"))
    script.main([*argv, "ours"])
    fresh_accelerator()
    module("floor").strip(clock.Clock("floor.stamps"), recipe, num_steps=2)
    with pytest.raises(SystemExit):
        script.main([*argv, "floor"])
    (ours, floor) = (clock.read(folder / f"{name}.stamps")[1] for name in ("ours", "floor"))
    assert [stamp.units for stamp in ours] == [stamp.units for stamp in floor]
    lines = [json.loads(line) for line in (folder / "ours" / "metrics.jsonl").read_text().splitlines()]
    assert [(s.units, pytest.approx(s.loss, rel=1e-5)) for s in ours] == [
        (line["tokens"], line["loss"]) for line in lines if "loss" in line
    ]
    assert floor[0].loss == pytest.approx(ours[0].loss, rel=1e-5)
    assert floor[1].loss != pytest.approx(floor[0].loss, rel=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# benchmarks/chats.py


@pytest.fixture
def chat_folder(module, tmp_path, monkeypatch):
    """Write the data and the recipe of a workload of benchmarks/chats.py, with a tiny model."""
    chats = module("chats")
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    }
    tiny = chats.SHAPE | shape | {"global_batch_size": 4}
    monkeypatch.setitem(chats.WORKLOADS, "tiny", chats.Workload(tiny))
    chats.write_data(tmp_path, 24)
    return module("harness").write_recipe(tmp_path / "tiny", chats.WORKLOADS["tiny"].values)


@pytest.mark.parametrize("words", [("trainer", "padded", "1"), ("trainer", "padded", "2"), ("exact", "rows", "2")])
def test_a_trainer_is_trained_on_our_samples(module, chat_folder, monkeypatch, words):
    """The numbers of trained tokens and the losses of its first steps are ours."""
    monkeypatch.chdir(chat_folder)
    trainers, clock = module("chat_trainers"), module("clock")
    data = trainers.prepare(chat_folder)
    memory = trainers.Memory(chat_folder / "base")
    trainers.train(chat_folder, clock.Clock("stamps"), memory, "no", *words, num_steps=2)
    _, stamps = clock.read(chat_folder / "stamps")
    assert [stamp.units for stamp in stamps] == data["first_steps"][:2]
    recipe = load(str(chat_folder / "recipe.yaml"))
    source, _ = recipe.parts.find("data")(recipe)
    torch.manual_seed(recipe.seed)
    model = causal_lm.CausalLmSums.from_recipe(recipe, None)
    epochs, ids = Order(len(source), 4, recipe.seed, recipe.epoch_end).samples(0)
    batch = source.collate([source.draw(*pair) for pair in zip(epochs.tolist(), ids.tolist(), strict=True)])
    num_targets = batch.pop("counts")
    sums, _ = model(**batch)
    assert int(num_targets) == stamps[0].units
    assert stamps[0].loss == pytest.approx(sums.item() / int(num_targets), rel=1e-5)

    beside, comparison = module("beside"), module("chats").COMPARISON
    seen = {"ours": stamps, "Trainer": stamps}
    beside.check_same(comparison, seen, data["first_steps"][:2], "no")
    others = [stamps[0]._replace(loss=1.001 * stamps[0].loss), stamps[1]]
    for expected, series in (([1, 2], stamps), (data["first_steps"][:2], others)):
        with pytest.raises(SystemExit):
            beside.check_same(comparison, seen | {"Trainer": series}, expected, "no")
    assert int((chat_folder / "base").read_text()) > 10_000


def test_a_round_is_a_number_of_steps(module):
    assert doctest.testmod(module("beside")).failed == 0


def test_the_page_of_chats(module):
    chats = module("chats")
    data = {"samples": 800, "pieces": 446, "quantiles": [34, 106, 310, 681], "mean_length": 133.4, "padding": 0.424}
    row = {"workload": "sft_512", "precision": "no", "data": data | {"supervised": 0.28}, "first_memory": 0.3}
    row |= {"rates": {"ours": [100.0, 120.0, 90.0], "floor": [125.0, 120.0, 100.0], "Trainer": [50.0, 40.0, 60.0]}}
    row |= {"memory": {"ours": 0.1, "floor": 0.1, "Trainer": 0.4}}
    row |= {"command": "python benchmarks/chats.py", "machine": "some machine", "load": 7.0}
    page = chats.markdown({"rows": [row]}).splitlines()
    assert "| workload | precision | ours | ours / floor | ours / Trainer |" in page
    assert "| sft_512 | no | 100 (90 to 120) | 0.90 (0.80 to 1.00) | 2.00 (1.50 to 3.00) |" in page
    assert "| sft_512 | no | 0.30 | 0.10 | 0.10 (1.00) | 0.40 (0.25) |" in page
    assert "3 rounds" in "\n".join(page)
    assert "some machine; UNDER LOAD, 7 other programs ran" in page[-1]
    assert "LOAD" not in chats.markdown({"rows": [row | {"load": 0.3}]})
