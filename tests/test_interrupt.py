"""Asked to stop: the step is finished and saved, and what goes on from there is bit-identical."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from cases import keep
from common import DROPOUT, ROOT, all_metrics, metrics, model_of, tiny_argv
from compare import same_weights, untimed_metrics
from faults import HANG, IN_A_STEP, train_with_code
from hooks import StepCount

from samestep import interrupt
from samestep.errors import UsageError
from samestep.recipe import run_settings as run
from samestep.training import checkpoint


@pytest.fixture
def during_step(after_forward):
    """Do something once in the middle of a step, behind the forward of its first micro-batch."""
    with StepCount() as done:

        def install(step: int, action) -> None:
            acted, first = [], done.value

            def act(*_, **__):
                if torch.is_grad_enabled() and done.value - first == step - 1 and not acted:
                    acted.append(True)
                    action()

            after_forward(model_of("pretrain_bert"), act)

        yield install


@pytest.mark.parametrize("number", keep(interrupt.SIGNALS, [signal.SIGTERM, signal.SIGINT]))
def test_a_signal_stops_the_run_at_the_step_border(train, scripts, corpus, tmp_path, during_step, number, capfd):
    flags = "--global_batch_size 8 --per_device_train_batch_size 3 --eval_steps 2 --record_samples" + DROPOUT
    whole = train("whole", flags)
    handler = signal.getsignal(number)
    during_step(4, lambda: os.kill(os.getpid(), number))
    code = scripts["pretrain_bert"].main(tiny_argv("pretrain_bert", corpus, tmp_path / "run", flags))
    assert code == interrupt.RESTART == 75
    assert signal.getsignal(number) == handler
    assert f"{number.name}: this step is finished and saved" in capfd.readouterr().err
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "run")] == ["checkpoint-4"]
    assert [line["step"] for line in all_metrics(tmp_path / "run")] == [0, 1, 2, 2, 3, 4], "no time for an evaluation"
    assert not (tmp_path / "run" / "all_results.json").exists()
    train("run", flags + " --resume_from_checkpoint latest")
    assert untimed_metrics(tmp_path / "run") == untimed_metrics(whole), "it is made up for"
    assert same_weights(tmp_path / "run", whole)


def test_in_the_last_step_there_is_nothing_left_to_stop(train, scripts, corpus, tmp_path, during_step):
    during_step(10, lambda: os.kill(os.getpid(), signal.SIGTERM))
    flags = "--global_batch_size 8 --per_device_train_batch_size 3"
    assert scripts["pretrain_bert"].main(tiny_argv("pretrain_bert", corpus, tmp_path / "run", flags)) == 0
    assert (tmp_path / "run" / "all_results.json").exists()


def test_a_limit_on_time(scripts, corpus, tmp_path):
    """Which is over at the first border of steps."""
    flags = "--global_batch_size 8 --max_train_minutes 1e-9"
    assert scripts["pretrain_bert"].main(tiny_argv("pretrain_bert", corpus, tmp_path / "run", flags)) == 75
    steps = metrics(tmp_path / "run")[-1]["step"]
    assert steps == 1
    assert (tmp_path / "run" / f"checkpoint-{steps}").exists()


def test_a_limit_on_time_is_refused_where_the_launcher_would_start_the_run_again(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(UsageError, match=r"max_train_minutes is 5\.0, but the launcher's --max_restarts would start"):
        run.parse(["--recipe", "bert_small_cpu", "--max_train_minutes", "5"], "bert_pretraining", "")


TWICE = """
import sys, types
from samestep import interrupt
moment = 0.0
interrupt.time = types.SimpleNamespace(monotonic=lambda: moment)
interrupt.StopRequest()
for line in sys.stdin:
    moment = float(line)
    print("now", flush=True)
"""
"""Its clock shows what it is told: that it answers means that signals before have been received."""


def test_the_same_request_may_come_twice_and_the_second_ends_the_process():
    """Launchers pass on what the terminal sent to all processes; a second request, a second later, is meant."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", TWICE], text=True, **pipes) as process:

        def set_clock(moment: float) -> None:
            process.stdin.write(f"{moment}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "now\n"

        for moment, number in ((0.0, signal.SIGINT), (0.9 * interrupt.REPEAT_SECONDS, signal.SIGTERM)):
            set_clock(moment)
            process.send_signal(number)
            set_clock(moment)
        set_clock(1.1 * interrupt.REPEAT_SECONDS)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 128 + signal.SIGINT
        assert process.stderr.read().splitlines() == [
            "SIGINT: this step is finished and saved, then the run stops; once more to stop at once",
            "stopping at once",
        ]


def test_signals_to_all_processes_leave_the_data_workers_at_work(corpus, tmp_path):
    """SIGINT as from a terminal, SIGTERM as from Slurm to all processes of a job's step: one request, as both come at once."""
    kills = [f"subprocess.run(['kill', '-{int(number)}', '0'])" for number in (signal.SIGINT, signal.SIGTERM)]
    program = tmp_path / "program.py"
    code = "; ".join(["import subprocess", *kills])
    program.write_text(HANG.format(helpers=str(ROOT / "tests" / "helpers"), code=code).replace("== 1", "== 0"))
    argv = tiny_argv("pretrain_bert", corpus, tmp_path / "run", "--global_batch_size 8 --dataloader_num_workers 2")
    command = [sys.executable, str(program), json.dumps(argv)]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    assert done.returncode == interrupt.RESTART, done.stderr[-3000:]
    assert done.stderr.count("this step is finished and saved") == 1
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "run")] == ["checkpoint-4"]


@pytest.mark.distributed
def test_a_signal_to_one_process_stops_all_at_the_same_step(trainings, train_on, corpus, tmp_path):
    flags = "--global_batch_size 8 --dtype float64"
    argv = tiny_argv("pretrain_bert", corpus, tmp_path / "run", flags)
    code = IN_A_STEP.format(code="os.kill(os.getpid(), signal.SIGTERM)")
    codes, _ = train_with_code(trainings, code, argv, tmp_path)
    assert codes == {0: interrupt.RESTART, 1: interrupt.RESTART}
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "run")] == ["checkpoint-4"]
    train_on(2, {"run": flags + " --resume_from_checkpoint latest", "whole": flags})
    assert untimed_metrics(tmp_path / "run") == untimed_metrics(tmp_path / "whole")
    assert same_weights(tmp_path / "run", tmp_path / "whole")
