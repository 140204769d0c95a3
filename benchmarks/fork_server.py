"""Training processes without the wait for imports: forked from a process that has imported everything and computed nothing.

They are processes like those of `accelerate launch` with accelerate_configs/2xcpu.yaml, one of them or several, each with its
own log, and can be killed at a chosen moment. `Server` is the benchmark's end; run as a program, this file is the other one.
"""

import contextlib
import gc
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from forked import fork, make_environments

from samestep.errors import exit_code

TIMEOUT = 120  # seconds after which a session hangs
ALONE = 15  # seconds that processes get to end after one of them has failed
SLOW = 0.02  # seconds that a slow disk takes at most
TICK = 2e-4  # seconds between two looks at a session


class Server:
    """Starts sessions, one at a time.

    Args:
        home: of the datasets' cache.
        threads: of each process.
    """

    def __init__(self, home: Path, threads: int = 1):
        environment = os.environ | {
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": str(threads),
            "CUDA_VISIBLE_DEVICES": "-1,-1",  # as in 2xcpu.yaml
            "ACCELERATE_MIXED_PRECISION": "no",
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), str(ROOT / "tests" / "helpers"), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "PYTHONWARNINGS": "ignore",
        }
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_) -> None:
        self.process.stdin.close()
        self.process.wait()

    def session(self, call: str, *arguments, log: Path, **options) -> dict:
        """Make a call of `_calls` in new processes. For `options` and what it returns see `_session`."""
        request = {"call": call, "arguments": arguments, "log": str(log)} | options
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("the fork server has ended")
        return json.loads(answer)


# ---------------------------------------------------------------------------------------------------------------------
# The other end


def serve() -> None:
    calls = _calls()
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        call = calls[request.pop("call")]
        print(json.dumps(_session(call, **request)), flush=True)


def _calls() -> dict:
    import matplotlib.figure  # noqa: F401 -- it and scipy.io are imported when they are used, which is in every run
    import scipy.io  # noqa: F401 -- by datasets, to be replaced
    from common import TINIES, load_script, write_corpus

    scripts = {name: load_script(name) for name in TINIES}
    gc.collect()
    gc.freeze()
    return {
        "train": lambda program, argv: scripts[program].main(argv),
        "train_on_a_slow_disk": lambda program, argv: _slow_disk() or scripts[program].main(argv),
        "train_timed": lambda program, argv, timeline: _train_timed(scripts[program], argv, Path(timeline)),
        "corpus": lambda folder: write_corpus(Path(folder)) and None,
    }


def _session(
    call,
    arguments: list,
    log: str,
    num_processes: int = 1,
    output_dir: str | None = None,
    kill: dict | None = None,
    timeout: float = TIMEOUT,
) -> dict:
    """Call in `num_processes` processes, until they end or are killed.

    Args:
        log: what process R prints goes to LOG.R.
        output_dir: where saves are seen.
        kill: `seconds` after an `event` all processes are: "start", "training" or "save" (the `count`th that begins).
        timeout: seconds after which they are, too, with their stacks in their logs.

    Returns:
        codes: exit codes by rank; killed: whether by `kill`; timed_out; seconds: until all ended; training: until training
        began, or null; first_step: after which it began; saves: how long each save took that was seen from begin to end.
    """
    logs = [Path(f"{log}.{rank}") for rank in range(num_processes)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        environments = make_environments(num_processes, free.getsockname()[1])
    partials = _partials(output_dir)
    start = time.monotonic()
    pids = [fork(lambda: exit_code(lambda: call(*arguments)), *pair) for pair in zip(logs, environments, strict=True)]
    codes: dict[int, int] = {}
    saves, save, num_saves, printed, training, first_step = [], None, 0, 0, None, 0
    deadline, kill_time, is_killed, has_timed_out = start + timeout, None, False, False
    while len(codes) < num_processes:
        now = time.monotonic()
        for pid in set(pids) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid]:
                    deadline = min(deadline, now + ALONE)

        is_saving = bool(_partials(output_dir) - partials)
        if is_saving and save is None:
            save, num_saves = now, num_saves + 1
        elif save is not None and not is_saving:
            saves.append(now - save)
            save = None
        if training is None and logs[0].exists() and logs[0].stat().st_size != printed:
            text = logs[0].read_bytes()
            printed = len(text)
            if match := re.search(rb"; steps (\d+) to \d+ of", text):
                training, first_step = now - start, int(match[1])

        if kill is not None and kill_time is None:
            has_come = {
                "start": True,
                "training": training is not None,
                "save": num_saves >= kill.get("count", 1),
            }[kill["event"]]
            kill_time = now + kill["seconds"] if has_come else None
        if kill_time is not None and now >= kill_time:
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGKILL)
                codes[pid], is_killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), True
        elif now >= deadline:
            has_timed_out = True
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGABRT)  # faulthandler prints the stacks
                codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0 if kill_time is not None else TICK)
    return {
        "codes": [codes[pid] for pid in pids],
        "killed": is_killed,
        "timed_out": has_timed_out,
        "seconds": time.monotonic() - start,
        "training": training,
        "first_step": first_step,
        "saves": saves,
    }


def _partials(output_dir: str | None) -> set[tuple[str, int]]:
    """List the saves that have begun and not ended: the folders' names and times of change."""
    partials = set()
    with contextlib.suppress(OSError, TypeError):
        for entry in os.scandir(output_dir):
            if entry.name.startswith(".checkpoint-") and entry.name.endswith(".partial"):
                partials.add((entry.name, entry.stat().st_mtime_ns))
    return partials


def _slow_disk() -> None:
    """Let each file of tensors, and each flush, wait up to `SLOW` seconds from now on."""
    import safetensors.torch

    rng = random.Random()  # other moments in each process

    def slow(write):
        return lambda *arguments, **keywords: time.sleep(rng.uniform(0, SLOW)) or write(*arguments, **keywords)

    os.fsync, safetensors.torch.save_file = slow(os.fsync), slow(safetensors.torch.save_file)


def _train_timed(script, argv: list[str], timeline: Path) -> int:
    """Train, and write when each step ended, when each save began and gave training back, and whether one was still written."""
    from samestep.training import checkpoint, report

    events, saved = [], []
    output_dir = Path(argv[argv.index("--output_dir") + 1])
    step, save = report.RunLog.end_step, checkpoint.Saver.save

    def note(event: str, number: int) -> None:
        is_writing = bool(saved) and not (output_dir / f"checkpoint-{saved[-1]}").exists()
        events.append({"what": event, "step": number, "time": time.perf_counter(), "is_writing": is_writing})

    def timed_step(log, ended):
        step(log, ended)
        note("step", ended.index + 1)

    def timed_save(saver, number, *arguments, **keywords):
        note("save", number)
        save(saver, number, *arguments, **keywords)
        saved.append(number)
        note("saved", number)

    report.RunLog.end_step, checkpoint.Saver.save = timed_step, timed_save
    code = script.main(argv)
    timeline.write_text(json.dumps(events))
    return code


if __name__ == "__main__":
    serve()
