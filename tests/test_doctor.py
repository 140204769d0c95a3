"""The doctor names what was done to runs that were broken on purpose, and leaves sound ones alone."""

import json
import math

import numpy as np
import pytest
import safetensors.torch
from common import ROOT, all_metrics, load_benchmark, metrics

from samestep import cli
from samestep.contrib.doctor import command, rules
from samestep.contrib.doctor.findings import EXPLAINS, MOST, Finding, choose
from samestep.contrib.doctor.history import make_history, read_history
from samestep.contrib.noise.meter import find_group
from samestep.errors import UsageError, exit_code
from samestep.recipe import run_settings
from samestep.recipe.exclusions import find_refusal


def read_layers(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "layers.jsonl").read_text().splitlines()]


def judge(losses, **columns) -> list[str]:
    """Judge a run of these losses; name what is told."""
    lines = [{"step": number, "loss": float(loss)} for number, loss in enumerate(losses, 1)]
    for name, values in columns.items():
        for line, value in zip(lines, values, strict=True):
            line[name] = float(value)
    return [finding.kind for finding in choose(rules.judge(make_history(lines)))]


def draw(seed: int, num_steps: int = 150, noise: float = 0.05) -> np.ndarray:
    """Draw the losses of a sound run: 6 falling to 4, and independent noise."""
    rng = np.random.default_rng(seed)
    return 4 + 2 * np.exp(-np.arange(num_steps) / (num_steps / 6)) + noise * rng.normal(size=num_steps)


# ---------------------------------------------------------------------------------------------------------------------
# Norms of layers


def test_norms_of_layers_are_those_of_the_step(train):
    flags = "--watch_layers 2 --max_train_steps 6 --checkpointing_steps 1 --logging_steps 3"
    folder = train("run", flags, program="pretrain_gpt2")
    steps, lines = metrics(folder), read_layers(folder)
    assert [line["step"] for line in lines] == [2, 4, 6]
    for line in lines:
        squares = sum(layer["grad_norm"] ** 2 for layer in line["layers"].values())
        assert math.sqrt(squares) == pytest.approx(steps[line["step"] - 1]["grad_norm"], rel=1e-5)
        norms = [step["grad_norm"] for step in steps[line["step"] - 2 : line["step"]]]
        assert line["share_clipped"] == sum(norm > 0.2 for norm in norms) / 2

    before, after = (
        safetensors.torch.load_file(folder / f"checkpoint-{step}" / "model.safetensors") for step in (3, 4)
    )
    layers = {}
    for name, tensor in before.items():
        own = next((layer for layer in lines[1]["layers"] if find_group(name).endswith(layer)), find_group(name))
        weights, update = layers.get(own, (0.0, 0.0))
        change = (after[name] - tensor).double().square().sum().item()
        layers[own] = weights + tensor.double().square().sum().item(), update + change
    found = {name: layer for name, layer in lines[1]["layers"].items() if name in layers}
    assert len(found) >= 3
    for name, layer in found.items():
        weights, update = layers[name]
        assert layer["weight_norm"] == pytest.approx(math.sqrt(weights), rel=0.05), "weights are read at 2,048 places"
        assert layer["update_ratio"] == pytest.approx(math.sqrt(update / weights), rel=0.1)


def test_norms_are_the_same_on_every_cut_and_change_nothing(train):
    flags = "--max_train_steps 4 --global_batch_size 8"
    whole = train("whole", f"{flags} --watch_layers 2 --per_device_train_batch_size 8")
    cut = train("cut", f"{flags} --watch_layers 2 --per_device_train_batch_size 3")
    without = train("without", f"{flags} --per_device_train_batch_size 8")
    for a, b in zip(read_layers(whole), read_layers(cut), strict=True):
        for name, layer in a["layers"].items():
            assert layer == pytest.approx(b["layers"][name], rel=1e-3, abs=1e-7)
    assert [line["loss"] for line in metrics(whole)] == [line["loss"] for line in metrics(without)]
    assert not (without / "layers.jsonl").exists()


def test_a_resumed_run_writes_each_line_once(train):
    flags = "--max_train_steps 6 --watch_layers 1"
    folder = train("run", f"{flags} --stop_after_step 3")
    train("run", f"{flags} --resume_from_checkpoint latest")
    assert [line["step"] for line in read_layers(folder)] == [1, 2, 3, 4, 5, 6]


def test_what_excludes_norms_of_layers():
    flags = ["--recipe", "bert_small_cpu", "--watch_layers", "5", "--accumulation", "optimizer"]
    flags += ["--second_moment", "unbiased"]
    with pytest.raises(UsageError, match="watch_layers is 5, but accumulation is optimizer"):
        run_settings.parse(flags, "bert_pretraining", "", trains_here=False)
    recipe, settings = run_settings.parse(flags[:4], "bert_pretraining", "", trains_here=False)
    assert "watch_layers is 5" in find_refusal(recipe, settings, is_sharded=True).reason


# ---------------------------------------------------------------------------------------------------------------------
# Rules


def test_nothing_is_found_in_noise():
    found = {seed: judge(draw(seed, noise=noise)) for noise in (0.01, 0.2) for seed in range(100)}
    assert {seed: kinds for seed, kinds in found.items() if kinds} == {}


@pytest.mark.parametrize("seed", range(5))
def test_each_fault_of_a_curve_is_named(seed):
    sound, n = draw(seed), 150
    places = np.arange(n)

    def changed(place: int, values) -> np.ndarray:
        losses = sound.copy()
        losses[place : place + len(values)] += values
        return losses

    assert judge(changed(90, [2.0])) == ["spike"]
    assert judge(changed(8, [3.0, 2.0])) == ["warm_up"]
    assert judge(changed(100, 0.1 * np.arange(50))) == ["divergence"]
    assert judge(changed(60, np.full(25, 1.0))) == ["order"], "a stretch of other samples"
    assert judge(sound + 0.4 * np.sin(places * 2 * np.pi / 12)) == ["oscillation"]
    wild = np.random.default_rng(seed).normal(size=50)
    assert judge(changed(100, 4 * (wild - np.median(wild)))) in (["oscillation"], ["divergence"])
    pattern = np.random.default_rng(seed).normal(size=25)
    epochs = (places + 1) / 25
    assert judge(sound + 0.2 * np.tile(pattern, 6), epoch=epochs) == ["order"]
    assert judge(sound + 0.2 * np.random.default_rng(seed).normal(size=n), epoch=epochs) == []


@pytest.mark.parametrize("seed", range(5))
def test_kinds_of_samples_one_after_another_are_named(seed):
    places = np.arange(160)
    begins = np.searchsorted([40, 80, 120], places, side="right")
    falls = np.exp(-(places % 40) / 12)
    noise = 0.05 * np.random.default_rng(seed).normal(size=160)
    assert judge(3 + 2 * falls + noise) == ["order"]
    assert judge(3 + 2 * falls + noise, learning_rate=falls) == [], "restarts of the rate"
    assert judge(5 + 2 * falls * (begins == 0) + noise) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_part_of_a_run_that_is_higher_in_the_mean_is_named(seed):
    losses = draw(seed, 300, noise=0.1)
    assert judge(losses) == []
    losses[180:220] += 0.25  # no step of it stands out
    assert judge(losses) == ["order"]
    assert judge(losses, learning_rate=np.where(np.arange(300) < 170, 1e-3, 2e-3)) == [], "the rate was raised there"


def judge_evaluated(losses, evaluations, num_epochs=7.5) -> list[str]:
    """Judge a run of some epochs with evaluations after equal parts of it."""
    lines = [
        {"step": number, "loss": float(loss), "epoch": num_epochs * number / len(losses)}
        for number, loss in enumerate(losses, 1)
    ]
    every = len(losses) // (len(evaluations) - 1)
    lines += [{"step": number * every, "eval_loss": loss} for number, loss in enumerate(evaluations)]
    return [finding.kind for finding in choose(rules.judge(make_history(lines)))]


def test_both_losses_that_rise_a_little_diverge():
    losses = draw(0, noise=0.03)
    losses[75:] += 0.2 * np.arange(75) / 75
    rising = [6.1, 5.0, 4.4, 4.1, 4.12, 4.17, 4.22]
    assert judge_evaluated(losses, rising) == ["divergence"]
    assert judge_evaluated(losses, sorted(rising, reverse=True)) == [], "the held-out loss falls"
    assert judge_evaluated(draw(0, noise=0.03), sorted(rising, reverse=True)) == []


def test_samples_that_are_known_by_heart_are_overfitting():
    losses = 2 * np.exp(-np.arange(150) / 15) + 0.003
    assert judge_evaluated(losses, [2.0, 1.2, 0.7, 0.6, 0.6, 0.61, 0.61]) == ["overfitting"]
    assert judge_evaluated(losses, [2.0, 1.2, 0.7, 0.6, 0.6, 0.61, 0.61], num_epochs=1) == [], "each sample came once"
    assert judge_evaluated(losses, [2.0, 1.2, 0.7, 0.6, 0.6, 0.61, 0.61], num_epochs=0) == ["overfitting"], "a stream"
    assert judge_evaluated(losses, [2.0, 1.2, 0.7, 0.6, 0.5, 0.4, 0.3]) == [], "it still falls"
    assert judge_evaluated(losses, [2.0, 1.2, 0.3, 0.05, 0.02, 0.02, 0.02]) == []


def test_a_small_held_out_loss_that_grows_is_overfitting():
    """It rises by little of the fall of the training loss, but nearly doubles."""
    losses = 1.35 * np.exp(-np.arange(150) / 15) + 0.008
    grows = [1.4, 0.06, 0.077, 0.085, 0.102, 0.111]
    assert judge_evaluated(losses, grows) == ["overfitting"]
    assert judge_evaluated(losses, [1.4, 0.06, 0.077, 0.07, 0.102, 0.11]) == [], "up and down"
    assert judge_evaluated(losses, [1.4, 0.06, 0.062, 0.065, 0.067, 0.07]) == [], "by less than a quarter"
    assert judge_evaluated(losses + 0.07, grows) == [], "the training loss is no lower"


@pytest.mark.parametrize(("accuracy", "found"), [(0.373, ["one_class"]), (0.39, []), (None, [])])
def test_a_classifier_that_names_one_class_has_learned_nothing(accuracy, found):
    results = {"eval_accuracy": accuracy, "eval_majority_accuracy": 22 / 59, "eval_samples": 59}
    lines = [{"step": step, "loss": loss} for step, loss in enumerate(draw(0).tolist(), 1)]
    history = make_history(lines, results=results)
    assert [finding.kind for finding in choose(rules.judge(history))] == found


def test_a_loss_that_is_still_before_it_falls_does_not_oscillate():
    losses = 3.466 + 1e-4 * np.random.default_rng(1).normal(size=150)
    losses[40:] = 3.3 - 0.002 * np.arange(110) + 0.08 * np.random.default_rng(2).normal(size=110)
    assert judge(losses) == []


def test_a_loss_that_ends_as_no_number_diverges():
    losses = np.append(draw(0), [np.nan, np.nan])
    assert judge(losses) == ["divergence"]
    assert judge(np.append(np.nan, draw(0))) == [], "a first step without a number, which came back"


def test_too_few_steps_are_not_judged():
    assert judge(np.linspace(1, 100, rules.MIN_STEPS - 1)) == []
    assert judge(np.linspace(1, 100, rules.MIN_STEPS)) == ["divergence"]


def test_at_most_three_findings_are_told_and_none_that_another_explains():
    def make(kind: str) -> Finding:
        return Finding(kind=kind, step=1, saw="", knob="", evidence={})

    assert [finding.kind for finding in choose(map(make, rules.RULES))] != []
    assert len(choose(map(make, ["dead_layer", "clipping", "overfitting", "warm_up"]))) == MOST
    assert [finding.kind for finding in choose(map(make, ["divergence", "spike"]))] == ["divergence"]
    assert set(EXPLAINS) | {kind for kinds in EXPLAINS.values() for kind in kinds} <= set(rules.RULES)


def test_the_noise_scale_makes_a_larger_batch_a_remedy():
    layers = [
        {"step": step, "layers": {name: {"grad_norm": 1.0, "weight_norm": 1.0, "update_ratio": 0.2} for name in "ab"}}
        for step in range(10, 50, 10)
    ]
    noisy = {"grad_signal": 1.0, "samples": 8}
    rng = np.random.default_rng(0)
    lines = [
        {"step": number, "loss": loss, "learning_rate": 0.1, "grad_noise": 20 + rng.normal()} | noisy
        for number, loss in enumerate(draw(0).tolist(), 1)
    ]
    (found,) = rules.judge(make_history(lines, layers, {"global_batch_size": 8}))
    assert (found.kind, found.step) == ("rate", 10)
    assert found.evidence["noise_scale"] == pytest.approx(160, rel=0.05)
    assert "or a larger batch" in found.knob
    (found,) = rules.judge(make_history(lines, layers, {"global_batch_size": 512}))
    assert "larger batch" not in found.knob


# ---------------------------------------------------------------------------------------------------------------------
# Files, and the command


def test_the_command(train, capsys):
    folder = train("run", "--max_train_steps 24 --eval_steps 8 --watch_layers 4 --validation_fraction 0.2")
    capsys.readouterr()
    assert cli.main(["doctor", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["nothing was found"]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    for number, line in enumerate(lines):
        values = json.loads(line)
        if "loss" in values and values["step"] > 16:
            lines[number] = json.dumps(values | {"loss": 9.0 + values["step"]})
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert cli.main(["doctor", str(folder), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert [finding["kind"] for finding in answer["findings"]] == ["divergence"]
    assert answer["findings"][0]["step"] in range(15, 25)
    assert cli.main(["doctor", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "1. divergence: the loss rises from" in out
    assert "change: learning_rate" in out


def test_the_log_of_trainer(tmp_path, capsys):
    losses = draw(0)
    losses[100:] += 0.1 * np.arange(50)
    log = [
        {"step": 10 * step, "loss": loss, "epoch": step / 50, "learning_rate": 1e-3}
        for step, loss in enumerate(losses.tolist(), 1)
    ]
    log.insert(50, {"step": 500, "eval_loss": 4.5, "eval_runtime": 1.0})
    state = {"log_history": [*log, {"step": 1500, "train_loss": 4.4}], "best_metric": None}
    for step in (500, 1500):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state if step > 500 else {}))
    assert len(read_history(str(tmp_path)).steps) == 150, "the last checkpoint's"
    assert cli.main(["doctor", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "1. divergence" in out
    assert "not judged: layers" in out
    assert cli.main(["doctor", str(tmp_path / "checkpoint-1500" / "trainer_state.json"), "--json"]) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "holds no metrics.jsonl and no trainer_state.json: give the output folder"),
        ("{}", "log_history must be a list of objects"),
        ('{"log_history": [{"loss": 1}]}', "log_history, line 1: step must be a whole number"),
        ('{"log_history": [{"step": -1, "loss": 1}]}', "log_history, line 1: step must be"),
        ("[1", "trainer_state.json"),
    ],
)
def test_mistakes_are_one_line(text, message, tmp_path, capsys):
    if text is not None:
        (tmp_path / "trainer_state.json").write_text(text)
    assert exit_code(lambda: cli.main(["doctor", str(tmp_path)])) == 2
    assert message in capsys.readouterr().err


def test_odd_numbers_of_trainer_are_gaps(tmp_path):
    log = [{"step": step, "loss": value} for step, value in enumerate([None, "3", True, 10**400, *[2.0] * 30])]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    history = read_history(str(tmp_path))
    assert np.isnan(history.loss[:4]).all()
    assert rules.judge(history) == []
    assert command.find_missing(history)


# ---------------------------------------------------------------------------------------------------------------------
# While a run goes


def test_a_run_that_goes_wrong_is_warned_of(train, capfd):
    flags = "--max_train_steps 60 --watch_layers 2 --logging_steps 5 --global_batch_size 4 --warmup_ratio 0"
    wrong = train("wrong", f"{flags} --learning_rate 3")
    events = [line for line in all_metrics(wrong) if "event" in line]
    assert len([event for event in events if event["event"].startswith("doctor: the rate is too high")]) == 1
    assert "doctor: the rate is too high" in capfd.readouterr().err
    sound = train("sound", f"{flags} --learning_rate 1e-3")
    assert [line for line in all_metrics(sound) if "event" in line] == []


# ---------------------------------------------------------------------------------------------------------------------
# Runs that were broken on purpose


@pytest.fixture(scope="module")
def benchmark():
    return load_benchmark("doctor")


KEPT = [("fit", 20, 18, 20), ("check", 20, 17, 20), ("again", 0, 0, 12), ("blind", 20, 18, 20), ("fresh", 10, 8, 13)]


@pytest.mark.parametrize(("group", "num_broken", "least_named", "num_sound"), KEPT)
def test_kept_runs_are_judged_as_the_page_says(benchmark, group, num_broken, least_named, num_sound):
    results = json.loads((ROOT / "benchmarks" / "results" / "doctor.json").read_text())
    rows = benchmark.judge_group(group)
    assert rows == results[group]
    broken = [row for row in rows if row["expected"]]
    assert (len(broken), len(rows) - len(broken)) == (num_broken, num_sound)
    assert sum(row["is_right"] for row in broken) >= least_named
    assert [row["name"] for row in rows if not row["expected"] and row["found"]] == []
