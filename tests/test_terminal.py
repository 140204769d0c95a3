"""A terminal that is closed, or a pipe whose reader ends, while a run prints to it: what it saves is saved all the same."""

import contextlib
import os
import signal

import pytest
from common import metrics, tiny_argv

from samestep import interrupt
from samestep.training import checkpoint


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
    for name in ("all_results.json", "model.safetensors", "loss.png"):
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


def test_hanging_up_twice_is_one_request(monkeypatch):
    """Shell and kernel both send it, and the launcher passes it on, seconds later."""
    ends = []
    monkeypatch.setattr(os, "_exit", ends.append)
    clock = iter([0.0, 100.0, 200.0])
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: next(clock))
    stop = interrupt.StopRequest()
    try:
        assert not stop
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert stop
        assert not ends
        signal.raise_signal(signal.SIGTERM)
        assert ends == [128 + signal.SIGTERM]
    finally:
        stop.close()
