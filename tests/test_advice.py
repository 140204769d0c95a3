"""`python -m recipes advise`: what batch a run's noise allows, the recipe for it, and when it is not known."""

import json
import math

import pytest

from samestep import cli
from samestep.contrib.advice import ramp
from samestep.contrib.growing import step_plan
from samestep.errors import exit_code
from samestep.recipe import catalog as recipes
from samestep.recipe.batch_size import Measurement

EVEN = (1.0, 9.0, 0.1)
"""Signal, noise, and by how much each changes between steps: a noise scale of 9 batches."""


@pytest.fixture
def ask(tmp_path, monkeypatch, capsys):
    """Make a run, and call `advise`: ask("gpt2_small_cpu", EVEN, 32, "flags") -> exit code, output, errors."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, noise: tuple[float, float, float], number: int, flags: str = "--json", **changes):
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        recipe = recipes.load(name, changes)
        (folder / "recipe.yaml").write_text(recipe.to_yaml())
        settings = {"num_processes": 2, "mixed_precision": "no", "device": "cpu"}
        (folder / "settings.json").write_text(json.dumps(settings))
        batch, (signal, level, change) = recipe.global_batch_size, noise
        steps = [
            {"step": n, "loss": 1.0, "samples": batch, "tokens": 100 * batch, "seconds": 36.0} for n in range(1, 101)
        ]
        noises = []
        for n, line in enumerate(steps[100 - number :] if number else []):
            sign = (-1) ** n
            line |= {
                "grad_signal": signal * (1 + sign * change),
                "grad_noise": level * (1 - sign * change),
                "seconds": 99.0,
            }
            layers = {"first": {key: line[key] for key in ("grad_signal", "grad_noise")}}
            noises.append({"step": line["step"], "samples": batch, "targets": {"lm": 99 * batch}, "layers": layers})
            noises[-1] |= {"per_device_train_batch_size": 4, "per_device_train_tokens": None}
        for file, lines in (("metrics", steps), ("noise", noises)):
            (folder / f"{file}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        code = exit_code(lambda: cli.main(["advise", "run", *flags.split()]))
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("noise", "is_known"),
    [
        ((0.0, 0.0, 0.0), False),
        ((1e-320, 1.0, 0.0), False),
        ((1e100, 1e100, 0.0), True),
        ((1e-300, 1e-300, 0.1), True),
    ],
)
def test_measurements_at_the_ends_of_what_a_float_holds(noise, is_known, ask):
    code, out, err = ask("gpt2_small_cpu", noise, 32)
    assert (code, err) == (0 if is_known else 1, "")
    assert ("unknown" in json.loads(out)) != is_known


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("metrics.jsonl", '{"step": 101, "loss": 1, "samples": "4"}', "metrics.jsonl, line 101: samples is '4'"),
        (
            "noise.jsonl",
            '{"step": 101, "samples": 4, "targets": 1, "layers": {}}',
            "noise.jsonl, line 33: targets is 1",
        ),
        ("settings.json", '{"num_processes": -2}', "settings.json: num_processes is -2, must be a whole number from 1"),
    ],
)
def test_a_file_that_breaks_a_rule_is_one_line(name, line, message, ask, tmp_path, capsys):
    ask("gpt2_small_cpu", EVEN, 32)
    with (tmp_path / "run" / name).open("w" if name == "settings.json" else "a") as file:
        file.write(line + "\n")
    assert exit_code(lambda: cli.main(["advise", "run"])) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_a_batch_that_may_grow(ask):
    """B / (B + noise scale) is a tenth, so 5 % more tokens allow half as much again: 24 = 3 micro-batches of 4 on 2."""
    code, out, _ = ask("gpt2_small_cpu", EVEN, 32)
    answer = json.loads(out)
    assert code == 0
    assert answer["noise_scale"]["value"] == pytest.approx(144, rel=0.01)
    assert answer["noise_scale"]["low"] < 144 < answer["noise_scale"]["high"] < 160
    assert answer["targets_per_sample"] == {"lm": 99}
    assert answer["advised_batch_size"] == 24
    rows = {row["batch_size"]: row for row in answer["batches"]}
    assert rows[24]["tokens"] == pytest.approx(1.05, abs=0.001)
    assert rows[24]["steps"] == pytest.approx(0.7, abs=0.001)
    assert (rows[16]["gradient_accumulation_steps"], rows[24]["gradient_accumulation_steps"]) == (2, 3)
    assert rows[16]["hours"] == pytest.approx(1.0), "measured steps, which are slower, do not count"
    assert rows[24]["hours"] == pytest.approx(1.05, abs=0.001)
    assert rows[24]["hours_without_accumulation"] == pytest.approx(0.35, abs=0.001)


def test_the_recipe_for_it(ask, tmp_path):
    """Learning rate by the root of 1.5, beta2 by its half-life, weight decay by its timescale, as many tokens of warm-up."""
    old = recipes.load("gpt2_small_cpu", {"lr_scaling_rule": "none"})
    code, out, _ = ask("gpt2_small_cpu", EVEN, 32, "--write_recipe new.yaml", lr_scaling_rule="none")
    new = recipes.load(str(tmp_path / "new.yaml"))
    assert code == 0
    assert "2xcpu.yaml --mixed_precision no scripts/pretrain_gpt2.py --recipe new.yaml" in out
    assert new.name == "gpt2_small_cpu_batch_24"
    assert (new.global_batch_size, new.learning_rate_batch_size, new.lr_scaling_rule) == (24, 24, "none")
    assert new.learning_rate == pytest.approx(old.learning_rate * 1.5**0.5, rel=1e-3)
    assert new.adam_beta2 == pytest.approx(old.adam_beta2**1.5, rel=1e-3)
    assert (new.adam_beta1, new.adam_epsilon) == (old.adam_beta1, old.adam_epsilon)
    timescales = [
        recipe.global_batch_size / recipe.learning_rate / recipe.weight_decay / tokens
        for recipe, tokens in ((old, 1.0), (new, 1.05))
    ]
    assert timescales[0] == pytest.approx(timescales[1], rel=2e-3)
    assert new.max_train_steps == pytest.approx(old.max_train_steps * 0.7, abs=1)
    assert new.num_warmup_steps == round(old.num_warmup_steps / 1.5)
    changed = {name for name in vars(old) if vars(old)[name] != vars(new)[name]}
    assert changed <= {
        *("name", "description", "source", "expect", "global_batch_size", "learning_rate", "learning_rate_batch_size"),
        *("adam_beta2", "weight_decay", "max_train_steps", "num_warmup_steps"),
    }


def test_a_batch_beyond_the_noise_scale_may_fall(ask):
    """SGD's learning rate falls in proportion, and k from 48 to 12."""
    code, out, _ = ask("resnet_digits_cpu", (4.0, 1.0, 0.1), 32, optimizer="sgd", sgd_momentum=0.9, adam_beta1=None,
                       adam_beta2=None, adam_epsilon=None, global_batch_size=384, lr_scaling_rule="none")  # fmt: skip
    answer = json.loads(out)
    rows = {row["batch_size"]: row for row in answer["batches"]}
    assert (code, answer["advised_batch_size"], answer["is_larger"]) == (0, 96, False)
    assert rows[96]["tokens"] == pytest.approx(0.4, abs=0.01)
    assert (rows[384]["gradient_accumulation_steps"], rows[96]["gradient_accumulation_steps"]) == (48, 12)
    old, new = answer["changes"]["learning_rate"]
    assert new == pytest.approx(old / 4, rel=1e-3)


def test_a_batch_that_is_right_stays(ask):
    code, out, _ = ask("gpt2_small_cpu", (1.0, 1.1, 0.1), 32, "--write_recipe new.yaml")
    assert code == 0
    assert "keep the batch of 16" in out


@pytest.mark.parametrize(
    ("noise", "number", "words"),
    [
        (EVEN, 0, ("no step's noise was measured", "--noise_scale_steps 3")),
        (EVEN, 5, ("fewer than 8", "--noise_scale_steps 3")),
        ((1.0, 9.0, 2.0), 12, ("too wide", "at least", "--noise_scale_steps")),
        ((-1.0, 20.0, 2.0), 12, ("too wide",)),
    ],
)
def test_it_says_when_it_does_not_know(ask, tmp_path, noise, number, words):
    code, out, _ = ask("gpt2_small_cpu", noise, number, "--write_recipe new.yaml")
    assert code == 1
    assert all(word in out for word in words), out
    assert "Advice" not in out
    assert not (tmp_path / "new.yaml").exists()
    code, out, _ = ask("gpt2_small_cpu", noise, number)
    assert (code, "unknown" in json.loads(out)) == (1, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "must be one"),
        ("run other", "must be one"),
        ("missing", "holds no metrics.jsonl and recipe.yaml"),
        ("run --max_extra_tokens 0", "max_extra_tokens is 0"),
        ("run --write_recipe mine", "must end in .yaml"),
    ],
)
def test_bad_usage(ask, capsys, words, message):
    ask("gpt2_small_cpu", EVEN, 32)
    assert exit_code(lambda: cli.main(["advise", *words.split()])) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def measure(ratio: float, first: int) -> list[Measurement]:
    """Make ten steps of a batch of 16 whose noise scale is `ratio` batches."""
    return [Measurement(first + number, 1 + (-1) ** number / 100, 16 * ratio) for number in range(10)]


def test_a_batch_that_grows_with_the_noise():
    """Each part gets the batch that its own share of the signal allows, but none that a later part does not."""
    windows = [measure(ratio, 1 + 10 * number) for number, ratio in enumerate((3, 9, 39, 19))]
    found = ramp.find_ramp(windows, 40, 16, 0.05, round)
    assert found.stages == ((0.0, 19), (0.25, 24), (0.5, 32))
    assert found.tokens == pytest.approx((1 + 0.25 * 3 / 16 + 1 + 0.1 * 0.5 + 1 + 1 / 40 + 1 + 0.05) / 4, rel=1e-2)
    assert found.steps == pytest.approx((1.047 * 16 / 19 + 1.05 * 16 / 24 + (1.025 + 1.05) * 16 / 32) / 4, rel=1e-2)
    old = recipes.load("gpt2_small_cpu")
    new, changes = ramp.make_recipe(old, found, "run")
    assert str(new.batch_schedule) == "19, 24 at 0.25, 32 at 0.5, rate by sqrt"
    assert changes["global_batch_size"] == [16, 32]
    plan = step_plan.plan_steps(new, 1000)
    assert plan.num_samples == pytest.approx(16 * old.max_train_steps * found.tokens, rel=0.01)
    assert plan.schedule(400) == pytest.approx(
        old.schedule(800, 62.5).peak
        * math.sqrt(plan.spans.find_size(400) / 16)
        * plan.schedule.by_samples.find_ratio(plan.spans.find(400)[0])
    )
    assert ramp.find_ramp([measure(9, 1), measure(9, 11)], 20, 16, 0.05, round) is None, "nothing grows"
    assert ramp.find_ramp(windows[:1], 10, 16, 0.05, round) is None


def test_the_command_writes_the_ramp(ask, tmp_path):
    """The noise of the run stays, so none is proposed; and a run whose batch grows is not advised on."""
    code, out, _ = ask("gpt2_small_cpu", EVEN, 32, "--ramp --write_recipe new.yaml")
    assert code == 0
    assert "no batch that grows: the noise scale does not grow by enough." in out
    assert not (tmp_path / "new.yaml").exists()
    growing = {"batch_schedule": "seesaw from 4", "lr_scaling_rule": "none"}
    code, out, _ = ask("gpt2_small_cpu", EVEN, 32, "", **growing)
    assert code == 1
    assert "its batch grows" in out
