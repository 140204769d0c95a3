"""Runs a program as `python PROGRAM ARGS` would, and records it: python -m stepaudit.program FOLDER STEPS PROGRAM ARGS

STEPS is how many steps are recorded, 0 for all. Parameters are put back after each step. With STEPS:train they move on; with
STEPS:kill they do, too, and the program ends as if it were killed when the next step begins, and nothing is recorded. With
STEPS:full they are put back, and what the program computes in 16 bits is computed in float32. With STEPS:plain each step is of
one large batch that the audit makes (`stepaudit.plain`); a mode may be several words, as plain+full.
"""

import multiprocessing
import os
import subprocess
import sys
import traceback
import types
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stepaudit.plain import PlainRecorder
from stepaudit.record import EnoughSteps, Recorder
from stepaudit.waiting import write_stacks

FAILURE_FILE = "failed"  # in FOLDER: says that the recorder failed, not the program


def main(folder: str, steps: str, program: str, *argv: str) -> None:
    sys.argv = [program, *argv]
    sys.path[0] = str(Path(program).resolve().parent)
    # Not runpy's, which empties the module at the end: DDP must not be destroyed after its process group.
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = program
    num_steps, _, mode = steps.partition(":")
    words = mode.split("+")
    recorder = (PlainRecorder if "plain" in words else Recorder)(
        0 if mode == "kill" else int(num_steps),
        keep_parameters=not {"train", "kill"} & set(words),
        is_full="full" in words,
    )
    code, pid = 0, os.getpid()
    write_stacks(Path(folder), int(os.environ.get("RANK", "0")))
    _count_children(recorder)
    # It can wait for ever while DistributedDataParallel is alive, as accelerator.end_training() calls it.
    torch.distributed.destroy_process_group = lambda *_, **__: None
    try:
        with recorder:
            if mode == "kill":
                _kill_after(recorder, int(num_steps))
            exec(compile(Path(program).read_bytes(), program, "exec"), module.__dict__)
    except EnoughSteps:
        pass
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)  # as Python does
    except BaseException as error:
        sys.stderr.write(traceback.format_exc())  # not by print, which programs silence on other processes
        code = 1
        frames = traceback.extract_tb(error.__traceback__)
        if Path(frames[-1].filename).parent == Path(__file__).parent and frames[-1].name != "main":
            (Path(folder) / FAILURE_FILE).write_text(f"{type(error).__name__}: {error}, in {frames[-1].name}")
    if os.getpid() == pid:  # not in a process that the program forked
        recorder.recording.save(Path(folder) / f"0-{recorder.recording.process_index}.npz")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what the program would do after its end (threads, process groups) does not concern us


def _kill_after(recorder: Recorder, num_steps: int) -> None:
    """End the process at once when a step begins after so many: whatever the program saves after a step is there by then."""

    def look(*_: Any) -> None:
        if len(recorder.recording.steps) >= num_steps:
            os._exit(0)

    register_optimizer_step_pre_hook(look)


def _count_children(recorder: Recorder) -> None:
    """Count the Python processes that the program starts: they are not recorded. A DataLoader's workers are daemons."""
    start, init = multiprocessing.process.BaseProcess.start, subprocess.Popen.__init__

    def start_and_count(process: Any) -> None:
        recorder.num_children += not process.daemon
        start(process)

    def init_and_count(process: Any, args: Any, *more: Any, **options: Any) -> None:
        words = [args] if isinstance(args, (str, bytes, os.PathLike)) else list(args)
        recorder.num_children += any("python" in Path(os.fsdecode(word)).name for word in words[:1])
        init(process, args, *more, **options)

    for owner, name, method in (
        (multiprocessing.process.BaseProcess, "start", start_and_count),
        (subprocess.Popen, "__init__", init_and_count),
    ):
        setattr(owner, name, method)


if __name__ == "__main__":
    main(*sys.argv[1:])
