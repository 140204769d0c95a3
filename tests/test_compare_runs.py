"""`python -m recipes compare`: where two runs part, in which tensors, by how much, and what is no run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from common import ROOT, model_of
from safetensors.numpy import save_file

from samestep import cli
from samestep.errors import exit_code
from samestep.step import accumulate
from samestep.training import recovery

FLAGS = "--global_batch_size 8 --per_device_train_batch_size 3 --digest_steps 1 --checkpointing_steps 4 --eval_steps 5"
NAME = "encoder.layer.1.output.dense.weight"


@pytest.fixture
def ask(capsys):
    """Call `compare`: ask("words") -> exit code, output, errors."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()  # what trainings printed
        code = exit_code(lambda: cli.main(["compare", *map(str, words)]))
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def flip(monkeypatch, after_forward):
    """Flip a bit of one element of one parameter's gradient: flip(7, before_digest=True).

    Before the digest the last bit. Behind it one that moments do not round away, and the norm does.
    """

    def install(step: int, *, before_digest: bool) -> None:
        owner, name = (recovery.Attempt, "confirm_gradient") if before_digest else (accumulate, "clip")
        original, calls, models = getattr(owner, name), [], []

        def note(model, outputs, **_):
            models[:] = [model]

        def act(*arguments):
            calls.append(None)
            if len(calls) == step:
                (gradient,) = [p.grad for n, p in models[0].named_parameters() if n.endswith(NAME)]
                bits = gradient.view(torch.int32).view(-1)
                bits[int(gradient.abs().argmax())] ^= 1 if before_digest else 1 << 3
            return original(*arguments)

        after_forward(model_of("pretrain_bert"), note)
        monkeypatch.setattr(owner, name, act)

    return install


def test_one_bit_of_one_gradient_is_found(train, flip, ask, tmp_path):
    """At its step, in its tensor; with rare digests between which of them; without digests nothing is guessed."""
    a, b = train("a", FLAGS), train("b", FLAGS)
    assert ask(a, b)[:2] == (
        0,
        f"A: {a}\nB: {b}\n{SAME}identical: 10 steps, 3 evaluations, 10 digests, 3 checkpoints\n",
    )
    flip(6, before_digest=True)
    shutil.rmtree(b)
    train("b", FLAGS)
    code, out, _ = ask(a, b, "--json")
    result = json.loads(out)
    parting, checkpoint = result["parting"], result["checkpoint"]
    assert (code, result["is_identical"], result["settings"]) == (1, False, {})
    assert (result["num_steps"], result["num_digests"], result["num_checkpoints"]) == (5, 5, 1)
    assert (parting["step"], parting["digests"]["step"], parting["digests"]["step_before"]) == (6, 6, 5)
    assert parting["digests"]["gradients"]["names"] == [f"bert.{NAME}"]
    assert {name.rpartition("/")[0] for name in parting["digests"]["moments"]["names"]} <= {f"bert.{NAME}"}
    assert parting["metrics"]["loss"]["relative"] == 0.0
    assert parting["metrics"]["grad_norm"]["relative"] < 1e-6
    assert (checkpoint["step"], checkpoint["total"]) == (8, 4 * parting["digests"]["parameters"]["total"])
    assert {"num_elements", "num_different", "largest", "relative"} < checkpoint["tensors"][0].keys()
    code, out, _ = ask(a, b)
    assert code == 1
    assert "they part at step 6\n" in out
    assert f"  gradients that differ: 1 of 46: bert.{NAME}\n" in out

    for folder in (a, b):
        keep_lines(folder / "digests.jsonl", lambda line: line["step"] % 4 == 0)
        keep_lines(folder / "metrics.jsonl", lambda line: line.pop("digest", None) or True)
    parting = json.loads(ask(a, b, "--json")[1])["parting"]
    assert parting["step"] in (7, 8), "its loss differs in a step after the bit, or nothing does before the digests"
    assert (parting["digests"]["step_before"], parting["digests"]["step"]) == (4, 8)
    assert "  tensors: the same after step 4, not after step 8; " in ask(a, b)[1]

    for folder in (a, b):
        (folder / "digests.jsonl").unlink()
    assert "--digest_steps 1 to have the tensors named" in ask(a, b)[1]


def test_one_bit_behind_the_digest_of_the_gradient_is_found_in_the_moments(train, flip, ask):
    flags = FLAGS + " --max_train_steps 4"
    a = train("a", flags)
    flip(3, before_digest=False)
    b = train("b", f"{flags} --logging_steps 3")
    result = json.loads(ask(a, b, "--json")[1])
    assert result["settings"] == {"run": {"logging_steps": [10, 3]}}
    digests = result["parting"]["digests"]
    assert (digests["step"], digests["gradients"]["names"]) == (3, [])
    names = digests["parameters"]["names"] + digests["moments"]["names"]
    assert {name.partition("/")[0] for name in names} == {f"bert.{NAME}"}


# ---------------------------------------------------------------------------------------------------------------------
# Files of no training

SAME = "settings: none differs of those that both recorded\n"


def keep_lines(path: Path, condition) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines if condition(line)))


def write_run(folder: Path, num_steps: int = 3, **changes) -> Path:
    """Write what a run leaves; `changes` are of its last line."""
    lines = [{"step": step, "loss": 2.0, "grad_norm": 1.0, "seconds": id(folder)} for step in range(1, num_steps + 1)]
    lines[-1] |= changes
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def write_checkpoint(folder: Path, step: int, tensors: dict[str, np.ndarray], hashes: str, **state) -> None:
    """Write a checkpoint whose files are named by `tensors`: FILE:TENSOR."""
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir()
    files = {name.partition(":")[0] for name in tensors}
    for file in files:
        save_file(
            {name.partition(":")[2]: t for name, t in tensors.items() if name.startswith(f"{file}:")}, checkpoint / file
        )
    manifest = {"files": {file: {"sha256": hashes} for file in sorted(files)}}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    (checkpoint / "state.json").write_text(json.dumps(state))


def test_settings_and_metrics_that_differ(ask, tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", loss=2.5, skipped=True, tokens=7)
    for folder, seed, batch in ((a, 1, None), (b, 2, 4)):
        (folder / "recipe.yaml").write_text(f"seed: {seed}\ntask: x\n")
        run = {"per_device_train_batch_size": batch, "output_dir": str(folder), "speed": "safe"}
        (folder / "settings.json").write_text(json.dumps(run))
        write_checkpoint(folder, 3, {}, "", versions={"torch": "2.13.0"}, data_fingerprints={"text": "0"})
    result = json.loads(ask(a, b, "--json")[1])
    settings = {"recipe": {"seed": [1, 2]}, "run": {"per_device_train_batch_size": [None, 4]}}
    assert result["settings"] == settings
    assert result["parting"]["step"] == 3
    assert result["parting"]["metrics"] == {
        "loss": {"values": [2.0, 2.5], "relative": 0.25},
        "grad_norm": {"values": [1.0, 1.0], "relative": 0.0},
        "skipped": {"values": [None, True], "relative": None},
        "tokens": {"values": [None, 7], "relative": None},
    }
    out = ask(a, b)[1]
    assert "  recipe    seed: 1 | 2\n" in out
    assert "  loss: 2.0 | 2.5, relative difference 2.5e-01\n  grad_norm: 1.0, the same\n" in out
    assert "by how much: unknown (1 checkpoint of both, none differs)" in out


def test_of_two_trainings_the_held_out_losses_stand_beside_the_verdict(ask, tmp_path):
    """Who compares two recipes asks which is better; of two cuts of one recipe nobody does."""
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", loss=2.5)
    for folder, seed, loss in ((a, 1, 1.5), (b, 2, 1.25)):
        lines = [
            json.loads(line) | {"samples": 8 * seed} for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]
        lines += [{"step": 0, "eval_loss": 3.0}, {"step": 3, "eval_loss": loss}]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        (folder / "recipe.yaml").write_text(f"seed: {seed}\n")
    assert json.loads(ask(a, b, "--json")[1])["last"] == {"eval_loss": [1.5, 1.25], "samples": [24, 48]}
    lines = ask(a, b)[1].splitlines()
    (place,) = (place for place, line in enumerate(lines) if line.startswith("verdict: different"))
    assert lines[place + 1] == "held-out loss at the end: 1.5 after 24 samples | 1.25 after 48 samples"
    assert lines[place + 2].startswith("they part at step"), "the verdict comes first"
    (b / "recipe.yaml").write_text("seed: 1\n")
    assert "held-out loss at the end" not in ask(a, b)[1]


@pytest.mark.parametrize(
    ("loss", "bias", "weight", "verdict"),
    [
        (2.0, 0.0, 0.0, "same bits"),
        (2.0 + 1e-8, 1.4, 1e-6, "equal to rounding"),
        (2.0, 1.4, 1e-6, "equal to rounding"),
        (2.0 + 1e-3, 0.0, 0.0, "different"),
        (2.0, 0.0, 0.1, "different"),
    ],
)
def test_a_comparison_ends_in_a_verdict(ask, tmp_path, loss, bias, weight, verdict):
    """Of losses and of all parameters together: a bias without a gradient may differ wholly, the whole may not."""
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", loss=loss)
    for folder, scale in ((a, 0.0), (b, 1.0)):
        tensors = {"key.bias": np.full(4, 1e-9 * (1 + scale * bias)), "weight": np.full(4, 1 + scale * weight)}
        moments = {"optimizer.safetensors:m.key.bias/exp_avg": np.full(4, 1e-9 * (1 + scale * bias))}
        hashes = folder.name if bias or weight else "same"
        write_checkpoint(folder, 3, {f"model.safetensors:{n}": t for n, t in tensors.items()} | moments, hashes)
    code, out, _ = ask(a, b, "--json")
    assert (code, json.loads(out)["verdict"]) == (int(verdict != "same bits"), verdict)
    text = " ".join(ask(a, b)[1].split())
    assert (f"verdict: {verdict}" in text) == (verdict != "same bits")
    assert ("train both with --reproducible" in text) == (verdict == "equal to rounding")
    assert ("biases of attention's keys" in text) == (verdict == "equal to rounding")
    if loss == 2.0 + 1e-8:
        assert "the largest relative difference of losses and evaluations is 5.0e-09 (loss, step 3;" in text


def test_a_difference_that_grows_from_rounding_is_said(ask, tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", loss=2.1)
    lines = (b / "metrics.jsonl").read_text().replace('"loss": 2.0', '"loss": 2.00000001', 1)
    (b / "metrics.jsonl").write_text(lines)
    for folder, batch in ((a, 64), (b, 10)):  # how it was cut decides no step
        (folder / "settings.json").write_text(json.dumps({"per_device_train_batch_size": batch}))
    text = " ".join(ask(a, b)[1].split())
    assert (
        "verdict: different: the largest relative difference of losses and evaluations is 5.0e-02 (loss, step 3;"
        in text
    )
    assert "they part by as little as rounding, which long trainings let grow" in text


def test_steps_that_only_one_has_and_events(ask, tmp_path):
    a, b = write_run(tmp_path / "a", 3), write_run(tmp_path / "b", 5)
    with (a / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "event": "memory ran out"}\n{"step": 4, "lo')  # cut off by a kill
    code, out, _ = ask(a, b)
    assert code == 1
    assert "steps 4 to 5: B has some that A lacks\n" in out
    assert "event in A, step 2: memory ran out\n" in out
    assert "not the same steps, but nothing differs of what both have: 3 steps, 0 evaluations" in out
    keep_lines(b / "metrics.jsonl", lambda line: line["step"] < 4)
    assert ask(a, b)[0] == 0, "an event alone is no difference"
    keep_lines(b / "metrics.jsonl", lambda line: False)
    assert ask(b, b)[0] == 1, "nothing was compared"


def test_by_how_much(ask, tmp_path):
    """Whole and sharded checkpoints; bits count, not values; names of moments are those of parameters."""
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    weight, zeros = np.array([[3, 4], [0, 0], [0, 0]], np.float32), np.array([0.0, 1.0])
    other = weight + np.array([[0, 0], [0, 1], [2, 0]], np.float32)
    write_checkpoint(a, 2, {"model.safetensors:w": weight}, "same")
    write_checkpoint(b, 2, {"model.safetensors:w": weight}, "same")
    moments = {"optimizer.safetensors:m.w/exp_avg": weight, "optimizer.safetensors:m.w/step": np.array(3, np.float32)}
    write_checkpoint(a, 3, {"model.safetensors:w": weight, "model.safetensors:z": zeros} | moments, "a")
    shards = {"model-00001-of-00002.safetensors:w": other[:2], "model-00002-of-00002.safetensors:w": other[2:]}
    moments["optimizer.safetensors:m.w/exp_avg"] = np.full_like(weight, np.nan)
    write_checkpoint(b, 3, shards | {"model-00001-of-00002.safetensors:z": zeros * [-1, 1]} | moments, "b")
    code, out, _ = ask(a, b, "--json")
    result = json.loads(out)
    assert (code, result["parting"]["step"], result["num_checkpoints"]) == (1, 3, 1)
    found = {f"{t.pop('kind')} {t.pop('name')}": list(t.values()) for t in result["checkpoint"]["tensors"]}
    assert found == {
        "parameters w": [6, 2, 2.0, 5.0, pytest.approx(0.2**0.5)],
        "parameters z": [2, 1, 0.0, 1.0, 0.0],
        "moments w/exp_avg": [6, 6, None, 5.0, None],
    }
    assert result["checkpoint"]["total"] == 4
    assert "  most by |a - b|:\n    -  moments w/exp_avg, 6 of 6 elements\n" in ask(a, b)[1]
    chunks = json.loads(ask(b, a, "--json")[1])["checkpoint"]["tensors"]
    assert {t["name"]: t["num_different"] for t in chunks} == {"w": 2, "z": 1, "w/exp_avg": 6}


def test_what_is_no_run_is_one_line(ask, tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    (tmp_path / "empty").mkdir()

    def explain(*words: object) -> str:
        code, out, err = ask(*words)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        return err

    assert "1 output folders come first, must be two" in explain(a)
    assert "3 output folders" in explain(a, b, a)
    assert "unknown flag --jsn" in explain(a, b, "--jsn")
    for folder in (tmp_path / "nowhere", tmp_path / "empty", a / "metrics.jsonl"):
        assert f"{folder} is no run, for it has no metrics.jsonl: give " in explain(a, folder)
    for text in ("[1]\n", "x\n", '{"step": "1"}\n', "\xff\n"):
        (b / "metrics.jsonl").write_text(text, encoding="latin-1")
        assert str(b / "metrics.jsonl") in explain(a, b)
    shutil.copy(a / "metrics.jsonl", b)
    for folder in (a, b):
        (folder / "digests.jsonl").write_text('{"step": 1, "gradients": 3}\n')
    assert "digests.jsonl, line 1: parameters is missing: mend the line" in explain(a, b)
    for folder in (a, b):
        (folder / "digests.jsonl").unlink()
        write_checkpoint(folder, 1, {"model.safetensors:w": np.zeros(2)}, folder.name)
    (b / "checkpoint-1" / "model.safetensors").write_bytes(b"no tensors")
    assert "model.safetensors cannot be read" in explain(a, b)
    (b / "checkpoint-1" / "manifest.json").write_text("{}")
    assert "manifest.json lists no files" in explain(a, b)
    shutil.rmtree(b / "checkpoint-1")
    (b / "recipe.yaml").write_text("- 1\n")
    assert "recipe.yaml" in explain(b, a)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1" + "0" * 400, '["x", {"y": NaN}]'])
@pytest.mark.parametrize("name", ["metrics.jsonl", "settings.json", "recipe.yaml"])
def test_values_that_json_lacks_are_named(value, name, ask, tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    new = {"metrics.jsonl": f'{{"step": 1, "loss": {value}}}\n', "settings.json": f'{{"device": {value}}}'}
    new["recipe.yaml"] = f"seed: {value.replace('NaN', '.nan').replace('-Infinity', '-.inf')}\n"
    (b / name).write_text(new[name])
    code, out, err = ask(a, b, "--json")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert f"{b / name}" in err
    assert "must be" in err


def test_it_needs_no_torch(tmp_path):
    for name in ("torch", "transformers", "accelerate", "datasets"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported')")
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    for folder in (a, b):
        write_checkpoint(folder, 1, {"model.safetensors:w": np.zeros(2)}, folder.name)
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "recipes", "compare", str(a), str(b)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("identical: 3 steps, 0 evaluations, 0 digests, 1 checkpoint\n")
