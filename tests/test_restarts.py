"""Workers that torchrun's agents start again: what the mode brings, how they end, and who owns the output folder."""

import os
import signal
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from accelerate.utils import InitProcessGroupKwargs
from common import ROOT, fresh_accelerator, model_of, python_path, tiny_argv
from forks import call_in_fork
from hooks import StepCount

from samestep import errors, interrupt
from samestep.errors import LostProcessError, UsageError, exit_code
from samestep.recipe import run_settings
from samestep.training import launch, output_folder

CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:26461"


@pytest.fixture
def restarted(monkeypatch):
    """As torchrun's agent starts workers again."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")


# ------------------------------------------------------------------------------------------------------------- settings


def parse(flags: str) -> run_settings.RunSettings:
    argv = tiny_argv("pretrain_gpt2", ROOT / "x.jsonl", "run", flags)
    return run_settings.parse(argv, "gpt2_pretraining", "")[1]


def test_what_the_mode_brings():
    assert (parse("").resume_from_checkpoint, parse("").async_checkpointing) == (None, False)
    run = parse("--fault_tolerance restart")
    assert (run.resume_from_checkpoint, run.async_checkpointing, run.checkpointing_minutes) == ("latest", True, 1.0)
    run = parse("--fault_tolerance restart --checkpointing_minutes 7 --async_checkpointing false")
    assert (run.resume_from_checkpoint, run.async_checkpointing, run.checkpointing_minutes) == ("latest", False, 7.0)
    with pytest.raises(UsageError, match="overwrite_output_dir and fault_tolerance restart"):
        parse("--fault_tolerance restart --overwrite_output_dir")


def test_one_store_for_several_generations_is_refused(monkeypatch):
    """torchrun's agents keep the address of the first one's store, and the keys in it."""
    for name, value in {"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        launch.create_accelerator(fault_tolerance="restart")


@pytest.mark.parametrize(("keeps_store", "has_own_keys"), [("True", True), ("False", False)])
def test_keys_of_a_generation_only_where_the_store_is_kept(monkeypatch, keeps_store, has_own_keys):
    """Agents on several machines count restarts differently: where each generation has a store, the count must not matter."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", keeps_store)
    fresh_accelerator()
    accelerator = launch.create_accelerator()
    assert accelerator.init_handler.init_method == ("generation2://" if has_own_keys else None)
    assert InitProcessGroupKwargs().init_method is None, "which is env://"


# --------------------------------------------------------------------------------------------------------------- ending


@pytest.mark.parametrize("error", [RuntimeError(CLOSED), dist.DistNetworkError("Failed to recv, got 0 bytes")])
def test_who_loses_another_process_ends_at_once(restarted, monkeypatch, error):
    monkeypatch.setenv("RANK", "1")

    def main():
        raise error

    code, said = call_in_fork(lambda: exit_code(main))
    assert code == 1
    (line,) = said.strip().splitlines()
    assert line.startswith("ERROR: process 1: another process has ended or hangs")


def test_other_errors_are_not_taken_for_that(restarted, monkeypatch):
    with pytest.raises(RuntimeError, match="shapes"):
        exit_code(lambda: (_ for _ in ()).throw(RuntimeError("shapes do not fit")))


def test_without_restarts_the_launcher_ends_it_before_there_is_a_traceback(monkeypatch):
    """A process that only knows that another one is gone leaves the report to that one; without launcher nothing waits."""
    waits = []
    monkeypatch.setattr(errors.time, "sleep", waits.append)
    for is_launched in (False, True):
        if is_launched:
            monkeypatch.setenv("RANK", "1")
        with pytest.raises(RuntimeError, match="Connection closed"):
            exit_code(lambda: (_ for _ in ()).throw(RuntimeError(CLOSED)))
        assert waits == [errors.PROCESS_0_SECONDS] * is_launched


WORKER = """
import signal, sys
from samestep import interrupt
interrupt.end_with_launcher()
signal.signal(signal.SIGTERM, lambda *_: (print("told", flush=True), sys.exit(0)))
print("ready", flush=True)
signal.pause()
"""
AGENT = """
import signal, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_a_worker_hears_of_the_death_of_its_agent():
    environment = os.environ | {"PYTHONPATH": python_path(ROOT), "TORCHELASTIC_RUN_ID": "mine"}
    words = [sys.executable, "-c", AGENT, WORKER]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as agent:
        assert agent.stdout.readline() == "ready\n"
        agent.send_signal(signal.SIGKILL)
        assert agent.stdout.readline() == "told\n"


def test_a_thread_of_ray_leaves_signals_alone():
    with ThreadPoolExecutor(1) as threads:
        request = threads.submit(interrupt.StopRequest).result()
    assert request.previous_handlers == {}
    assert not request


# --------------------------------------------------------------------------------------------------------- output folder

HOLDER = """
import sys
from pathlib import Path
from samestep.training import output_folder
output_folder._lock(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.readline()
try:
    output_folder.check_lock(Path(sys.argv[1]))
except output_folder.LostProcessError as error:
    print(error, flush=True)
"""


def test_the_folder_is_taken_from_a_frozen_generation_of_the_same_launch(restarted, tmp_path, monkeypatch, capfd):
    waits = []
    clock = types.SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append)
    monkeypatch.setattr(output_folder, "time", clock)
    environment = os.environ | {"PYTHONPATH": python_path(ROOT)}
    words = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as holder:
        assert holder.stdout.readline() == "locked\n"
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
        with pytest.raises(UsageError, match=f"in use by another run .process {holder.pid}.*launch mine"):
            output_folder._lock(tmp_path)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
        output_folder._lock(tmp_path)
        assert sum(waits) >= output_folder.SECONDS_TO_UNLOCK, "it may be about to end"
        assert "does not end" in capfd.readouterr().err
        output_folder.check_lock(tmp_path)
        holder.stdin.write("\n")
        holder.stdin.flush()
        assert "was taken by another process" in holder.stdout.readline()


def test_who_has_lost_the_folder_writes_no_more(train, after_forward, tmp_path):
    """A line of steps that another process computes by now would be there twice."""

    def steal(*_, **__):
        if done.value == 4:
            (tmp_path / "run" / ".lock").unlink(missing_ok=True)

    after_forward(model_of("pretrain_bert"), steal)
    with StepCount() as done, pytest.raises(LostProcessError, match="was taken by another process"):
        train("run", "--global_batch_size 8 --logging_steps 1")
    assert '"step": 5' not in (tmp_path / "run" / "metrics.jsonl").read_text()
