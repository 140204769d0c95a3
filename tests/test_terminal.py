"""What a run prints to a terminal, and to a file. A terminal that is closed, or a pipe whose reader ends, while a run prints to
it: what it saves is saved all the same."""

import contextlib
import functools
import io
import itertools
import os
import re
import shlex
import signal

import pytest
from cases import thorough
from common import metrics, tiny_argv
from forks import FAILED, call_in_fork
from rooms import PAGES
from tqdm import tqdm

from samestep import cli, errors, interrupt, printing
from samestep._internals import library_output
from samestep.training import checkpoint, publishing

# ---------------------------------------------------------------------------------------------------------------------
# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def in_one_style():
    """Show progress as a run does, each change at once."""
    library_output.show_progress_in_one_style(line_seconds=0)
    yield
    library_output.show_progress_in_one_style()


def show_progress(file: io.StringIO, num_steps: int = 3, **options) -> str:
    """Show a bar of some steps, and a line after each, as evaluations are."""
    bar = tqdm(desc="Training", unit="steps", file=file, mininterval=0, **{"total": num_steps} | options)
    for step in range(num_steps):
        bar.set_postfix_str(f"loss {step}.5, 7,000 tokens/s, 1.20 GB", refresh=False)
        bar.update()
        tqdm.write(f"step {step}", file=file)
    bar.close()
    return file.getvalue()


def test_progress_in_a_file_is_lines(in_one_style):
    text = show_progress(io.StringIO())
    assert "\r" not in text
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("step")] == ["step 0", "step 1", "step 2"]
    progress = [line for line in lines if not line.startswith("step")]
    assert re.fullmatch(r"Training: 1/3 steps, \d\d:\d\d left, loss 0\.5, 7,000 tokens/s, 1\.20 GB", progress[0])
    assert progress[-1] == "Training: 3/3 steps, 00:00 left, loss 2.5, 7,000 tokens/s, 1.20 GB"
    assert sum("3/3" in line for line in progress) == 1


def test_progress_in_a_file_is_a_line_now_and_then(in_one_style):
    library_output.show_progress_in_one_style(line_seconds=1000)
    lines = show_progress(io.StringIO()).splitlines()
    assert [line.partition(",")[0] for line in lines] == ["step 0", "step 1", "step 2", "Training: 3/3 steps"]


def test_progress_without_an_end(in_one_style):
    """As `datasets` reads files: how much there will be is not known."""
    lines = show_progress(io.StringIO(), total=None).splitlines()
    assert re.fullmatch(r"Training: 3 steps in \d\d:\d\d", lines[-1])


@pytest.mark.parametrize(
    ("columns", "shown"), [(120, "1.20 GB"), (68, "7,000 tokens/s"), (52, "loss 2.5"), (34, "left")]
)
def test_progress_on_a_terminal_is_one_line(in_one_style, columns, shown):
    """What stands last is left out where there is no room for it."""
    text = show_progress(Terminal(), ncols=columns, ascii=False)
    bars = [part.rstrip() for part in re.split(r"[\r\n]", text) if part.startswith("Training")]
    assert max(map(len, bars)) <= columns
    assert bars[-1].startswith("Training: 3/3 steps |█")
    assert bars[-1].endswith(shown)


def test_lines_of_a_file_stand_in_order():
    """Those of stdout are written at once, between those of stderr."""
    file = io.BytesIO()
    out, err = io.TextIOWrapper(file), io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        interrupt.outlive_readers()
        print("a line")
    assert file.getvalue() == b"a line\n"


def test_lines_fit_a_terminal(monkeypatch):
    """They are folded between words; in a file, and where there is room, they stay as they are."""
    text = "step 5: eval_loss 6.9987, eval_accuracy 0.4250\n  capitals: loss 5.3792, accuracy 0.3077"
    assert (printing.fold(text), printing.line_width(100)) == (text, 100)
    with contextlib.redirect_stdout(Terminal()):
        monkeypatch.setenv("COLUMNS", "80")
        assert (printing.fold(text), printing.line_width(100)) == (text, 80)
        monkeypatch.setenv("COLUMNS", "32")
        lines = printing.fold(text).splitlines()
    assert lines == [
        "step 5: eval_loss 6.9987,",
        "  eval_accuracy 0.4250",
        "  capitals: loss 5.3792,",
        "    accuracy 0.3077",
    ]


@functools.cache  # the widest is the same for all columns
def write_wide(line):
    with contextlib.redirect_stdout(io.StringIO()) as file:
        cli.main(line.split())
    return file.getvalue()


WHAT_FITS = "plan --what_fits 1xt4 --price_per_hour 2"  # plans 225 pairs of model and method: seconds
TABLES = (
    "plan gpt2_124m --on 8xh100,4x4090,2x8xa100-80 --price_per_hour 2.5,0.4,1.5",
    "scale gpt2_124m --on a100-80 --up_to 8",
    "list bert",
)


@pytest.mark.parametrize(
    ("line", "columns"),
    [
        (WHAT_FITS, 70),
        *(thorough(WHAT_FITS, columns) for columns in (80, 100, 200)),
        *itertools.product(TABLES, (70, 80, 100, 200)),
    ],
)
def test_tables_fit_a_terminal(monkeypatch, line, columns):
    """A row that is too long goes on in the next line; no number of it is lost."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with contextlib.redirect_stdout(Terminal()) as file:
        cli.main(line.split())
    texts = [write_wide(line), file.getvalue()]
    assert max(map(len, texts[1].splitlines())) <= columns
    wide, narrow = ([word for word in text.split() if word not in ("\\", "|")] for text in texts)
    assert not set(wide) - set(narrow)
    assert len(narrow) >= len(wide)
    if line.startswith("list") and columns < 100:  # a description goes on where it began
        first, second, *_ = texts[1].splitlines()
        assert len(second) - len(second.lstrip()) == first.index("BERT-Base")


def test_a_closed_output():
    """As of `samestep list >&-`."""
    with contextlib.redirect_stdout(None):
        assert errors.exit_code(lambda: cli.main(["list", "bert"])) == 0


def test_the_next_command_is_one(monkeypatch, tmp_path):
    """The summary names a command that starts here, whether the environment is activated or not."""
    for path in (os.environ["PATH"], ""):
        monkeypatch.setenv("PATH", path)
        program, *words = shlex.split(publishing._own_command())
        assert words in ([], ["-m", "samestep"])
        assert program == "samestep" or os.access(program, os.X_OK)
    (tmp_path / "metrics.jsonl").touch()
    cli.main(["watch", str(tmp_path), "--html", str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").exists()


# ---------------------------------------------------------------------------------------------------------------------
# A terminal that is closed


@pytest.mark.parametrize("kind", ["SIGHUP", "nohup"])
def test_a_closed_terminal(trainings, corpus, tmp_path, kind):
    """Writing fails from then on; under nohup, which makes no request to stop of it, the training goes on to its end."""
    argv = tiny_argv("pretrain_bert", corpus, tmp_path / "run", "--global_batch_size 8 --logging_steps 1")
    trainings.run([str(tmp_path), kind, *argv], 1, module="run_in_terminal")
    is_finished = kind == "nohup"
    assert int((tmp_path / "code").read_text()) == (0 if is_finished else interrupt.RESTART)
    last = 10 if is_finished else 4
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "run")] == [f"checkpoint-{last}"]
    assert metrics(tmp_path / "run")[-1]["step"] == last
    for name in ("all_results.json", "model.safetensors", *PAGES):
        assert (tmp_path / "run" / name).exists() == is_finished


def test_another_error_of_writing_is_raised():
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:
        stream = interrupt._LastingStream(full)
        stream.write("lost")
        with pytest.raises(OSError, match="No space left"):
            stream.flush()


@pytest.mark.parametrize(
    ("passed_on", "is_handled"), [(None, False), ("SIGTERM,SIGINT", False), ("SIGTERM,SIGHUP", True)]
)
def test_ignored_hanging_up_is_a_request_where_torchrun_passes_it_on(monkeypatch, passed_on, is_handled):
    """It handles SIGHUP under nohup, too, and kills workers that have not ended 30 s later."""
    if passed_on is not None:
        monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", passed_on)
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = interrupt.StopRequest()
    try:
        signal.raise_signal(signal.SIGHUP)
        assert bool(stop) == is_handled
    finally:
        stop.close()
        assert signal.signal(signal.SIGHUP, previous) == signal.SIG_IGN


def test_hanging_up_twice_is_one_request():
    """Shell and kernel both send it, and the launcher passes it on, seconds later."""

    def hang_up() -> int:
        stop = interrupt.StopRequest()
        assert not stop
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert stop
        stop.request_time -= 100  # as if that were so many seconds ago
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        return FAILED  # it has ended before

    code, said = call_in_fork(hang_up)
    assert code == 128 + signal.SIGTERM, said
