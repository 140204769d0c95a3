"""Files of a run: what breaks a rule is named by its line, whatever it is; what a run writes obeys the rules."""

import json
import os

import pytest

from samestep.errors import UsageError
from samestep.recipe import run_fields, run_files
from samestep.training import output_folder


def write(path, *lines: bytes, end: bytes = b"\n"):
    path.write_bytes(b"\n".join(lines) + end)
    return path


STEP = b'{"step": 1, "loss": 2.5, "samples": 4, "seconds": 0.5}'
WRONG = {
    b'{"step": "7", "loss": 1}': r"step is '7', must be a whole number from 0 to 2\^53 - 1",
    b'{"step": -3, "loss": 1}': "step is -3, must be a whole number",
    b'{"step": 9007199254740992, "loss": 1}': "step is 9007199254740992, must be a whole number",
    b'{"step": 2.0, "loss": 1}': "step is 2.0, must be",
    b'{"step": false, "loss": 1}': "step is false, must be",
    b'{"loss": 1}': "step is missing",
    b'{"step": 2, "loss": -Infinity}': "loss is -inf, must be a finite number, or null",
    b'{"step": 2, "eval_x": 2' + b"0" * 350 + b"}": "eval_x is a number of 351 digits, must be a finite number",
    b'{"step": 2, "loss": 2' + b"0" * 4400 + b"}": "it is no JSON object",
    b'{"step": 2, "grad_norm": [1, [2]]}': r"grad_norm is \[1, \[2\]\], must be",
    b'{"step": 2, "loss": true}': "loss is true, must be",
    b'{"step": 2, "seconds": -0.1}': "seconds is -0.1, must be a number from 0",
    b'{"step": 2, "samples": 1.5}': "samples is 1.5, must be a whole number",
    b'{"step": 2, "web/samples": null}': "web/samples is null, must be a whole number",
    b'{"step": 2, "lm_grad_noise": 1e200}': r"lm_grad_noise is 1e\+200, must be a number up to 1e\+100",
    b'{"step": 2, "digest": 3}': "digest is 3, must be a text",
    b'{"step": 2, "event": "' + b"x" * 10_001 + b'"}': "event is 'xxx.*must be a text of at most 10,000",
    b'{"step": 2, "event": "x", "sizes": [1]}': r"sizes is \[1\], must be a finite number, true",
    b'{"step": 2, "' + b"n" * 1001 + b'": 1}': "the name of a field has 1,001 characters, more than 1,000",
    b'{"step": 2, "\\u001b[31m": "x"}': r"\\x1b\[31m is 'x', must be a finite number",
    b"3": "it is no JSON object",
    b"": "it is no JSON object",
    b"\0\0\0": "it is no JSON object",
    b'{"step": 2' + b"}" * 9: "it is no JSON object",
    b'{"step": 2, "loss": ' + b"[" * 50_000: "it is no JSON object",
    STEP.decode().encode("utf-16"): "it is no JSON object",
    b"\x80": "it is no JSON object",
    STEP[:-1] + b" " * 2**20 + b"}": "it has more than 1,048,576 bytes",
    b"z" * 2**22: "it has more than 1,048,576 bytes",
}


@pytest.mark.parametrize("line", WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_a_line_that_breaks_a_rule_is_named_in_one_line(line, tmp_path):
    path = write(tmp_path / "metrics.jsonl", STEP, STEP, line, STEP)
    with pytest.raises(UsageError, match=rf"metrics\.jsonl, line 3: {WRONG[line]}.*: mend the line, or take") as error:
        list(run_files.read_lines(path))
    assert len(error.value.problems) == 1
    assert len(str(error.value)) < 500
    assert str(error.value).isprintable()


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b'\n{"step": 3, "lo', b"\n\0\0\0\0"])
def test_what_a_kill_cut_off_is_left_out_and_the_rest_is_read(end, tmp_path):
    path = write(tmp_path / "metrics.jsonl", STEP, STEP, end=end)
    assert len(list(run_files.read_lines(path))) == 2
    assert list(run_files.read_lines(tmp_path / "noise.jsonl")) == []


def test_a_last_line_that_is_whole_but_wrong_is_no_line_that_was_cut_off(tmp_path):
    path = write(tmp_path / "metrics.jsonl", STEP, b'{"step": "x"}', end=b"")
    with pytest.raises(UsageError, match="line 2: step is 'x'"):
        list(run_files.read_lines(path))


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_is_not_waited_for(kind, tmp_path):
    path = tmp_path / "metrics.jsonl"
    {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda path: os.symlink("/dev/zero", path)}[kind](path)
    with pytest.raises(UsageError, match=r"metrics\.jsonl cannot be read: "):
        list(run_files.read_lines(path))


@pytest.mark.parametrize("piece", [1, 7, 64, 2**20])
def test_lines_are_the_same_in_pieces_of_any_size(piece, tmp_path):
    """Lines longer than a piece, empty lines, a line that grows, one that is too long."""
    path = tmp_path / "metrics.jsonl"
    file = run_files.LineFile(path)
    file.piece, file.max_bytes = piece, 80
    path.write_bytes(b"a\n\n" + STEP + b"\n" + b"y" * 81 + b"\nhal")
    assert list(file.read()) == [(1, b"a"), (2, b""), (3, STEP), (4, None)]
    assert (file.end, file.rest) == (3 + len(STEP) + 1 + 82, b"hal")
    os.truncate(path, file.end)  # as a writer does that begins the line again
    with path.open("ab") as more:
        more.write(b"whole\n" + b"z" * 500)
    assert list(file.read()) == [(5, b"whole")]
    assert file.rest is None
    with path.open("ab") as more:
        more.write(b"z\nlast\n")
    assert list(file.read()) == [(6, None), (7, b"last")]


def test_a_line_that_does_not_end_is_given_up(tmp_path):
    path = write(tmp_path / "metrics.jsonl", STEP, b"\0" * 2**23, STEP)
    file = run_files.LineFile(path)
    file.max_passed = 2**21
    assert [number for number, _ in file.read()] == [1]
    assert file.is_given_up
    with pytest.raises(UsageError, match="line 2: it has more than 1,048,576 bytes"):
        list(run_files.read_lines(path))


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        (
            "noise.jsonl",
            {"step": 1, "samples": 0, "targets": {}, "layers": {}},
            "samples is 0, must be a whole number from 1",
        ),
        ("noise.jsonl", {"step": 1, "samples": 1, "targets": {"lm": "3"}, "layers": {}}, "targets is "),
        ("noise.jsonl", {"step": 1, "samples": 1, "targets": {}, "layers": {"w": {"grad_signal": 1}}}, "layers is "),
        ("noise.jsonl", {"step": 1, "samples": 1, "targets": {}}, "layers is missing"),
        ("digests.jsonl", {"step": 1, "gradients": {}, "parameters": {"w": 1}, "moments": {}}, "parameters is "),
        ("samples.jsonl", {"step": 1, "process": None}, "process is null, must be a whole number"),
        ("samples.jsonl", {"step": 1, "event": {"a": 1}}, "event is .*must be a finite number, true, false"),
    ],
)
def test_lines_of_other_files(name, line, message, tmp_path):
    path = write(tmp_path / name, json.dumps(line).encode())
    with pytest.raises(UsageError, match=rf"{name}, line 1: {message}"):
        list(run_files.read_lines(path))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_processes": 0}, "num_processes is 0, must be a whole number from 1"),
        ({"batch_sizes": [[5]]}, r"batch_sizes is \[\[5\]\], must be at most 10,000 pairs"),
        ({"batch_sizes": {"5": 4}}, "batch_sizes is "),
        ({"num_steps": float("nan")}, "num_steps is nan"),
        ({"other": [{"a": 10**400}]}, "other is .*must be made of finite numbers"),
        ({"device": ["cpu"]}, "device is "),
    ],
)
def test_settings_that_break_a_rule(values, message, tmp_path):
    (tmp_path / "settings.json").write_text(json.dumps(values))
    with pytest.raises(UsageError, match=rf"settings\.json: {message}"):
        run_files.read_settings(tmp_path / "settings.json")


def test_resuming_leaves_all_files_as_they_were_where_a_line_breaks_a_rule(tmp_path):
    """The second file is wrong: lines of later steps are still in the first."""
    metrics = write(tmp_path / "metrics.jsonl", STEP, b'{"step": 5, "loss": 1}')
    noise = write(tmp_path / "noise.jsonl", b'{"step": 4, "samples": "4"}')
    before = metrics.read_bytes(), noise.read_bytes()
    with pytest.raises(UsageError, match=r"noise\.jsonl, line 1: "):
        output_folder.prepare_lines(tmp_path, 1, 10)
    assert (metrics.read_bytes(), noise.read_bytes()) == before
    noise.unlink()
    output_folder.prepare_lines(tmp_path, 1, 10)
    assert metrics.read_bytes() == STEP + b"\n"


def test_what_runs_write_obeys_the_rules(train):
    """Every file of lines of a training, and its settings and state."""
    flags = (
        "--global_batch_size 8 --record_samples --digest_steps 1 --noise_scale_steps 2 --eval_steps 5 --watch_layers 2"
    )
    folder = train("run", f"{flags} --checkpointing_steps 5")
    for name in run_fields.FIELDS:
        assert list(run_files.read_lines(folder / name)), name
    assert run_files.read_settings(folder / "settings.json")["num_steps"] == 10
    (state, *_) = sorted(folder.glob("checkpoint-*/state.json"))
    assert not run_fields.find_problems(json.loads(state.read_text()), run_fields.STATE)
