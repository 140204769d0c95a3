"""Faults that a run must survive or report: memory that runs out, a process that does something in the middle of a step."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import torch
from common import ROOT, count_samples, launch_environment, model_of
from forked import Server
from hooks import call_after_forward

LAUNCH = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--config_file"),
    *(str(ROOT / "accelerate_configs" / "2xcpu.yaml"), "--main_process_port", "0", "--mixed_precision", "no"),
]
IN_A_STEP = """
import os, signal
from samestep.step import accumulate
seed_noise = accumulate.seed_noise
def note(accelerator, seed, step):
    if step == 3 and accelerator.process_index == 1:
        {code}
    seed_noise(accelerator, seed, step)
accumulate.seed_noise = note
"""
"""Does something on process 1 in the middle of step 4."""
HANG = f"""
import json, sys
sys.path.insert(0, {{helpers!r}})
from common import load_script
{IN_A_STEP}
from samestep.errors import exit_code
sys.exit(exit_code(lambda: load_script("pretrain_bert").main(json.loads(sys.argv[1]))))
"""


@contextlib.contextmanager
def limit_memory(program: str, num_samples):
    """Let micro-batches of more than `num_samples()` samples run out of memory."""

    def fail(model, outputs, **micro_batch):
        if torch.is_grad_enabled() and count_samples(micro_batch) > num_samples():
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with call_after_forward(model_of(program), fail):
        yield


def train_with_code(
    server: Server, code: str, argv: list[str], folder: Path, config: str = "2xcpu"
) -> tuple[dict[int, int], str]:
    """Train BERT on two processes that execute `code` before; return their exit codes, and what they printed.

    The processes are forked; `launch_code` launches them. One that fails ends the other, which then has no exit code.
    """
    environment = launch_environment(ROOT / "accelerate_configs" / f"{config}.yaml")
    words = [str(folder), code, *argv]
    with contextlib.suppress(RuntimeError):
        server.run(words, 2, environment=environment, module="run_with_code", can_repeat=False)
    files = {rank: folder / f"code-{rank}" for rank in (0, 1)}
    codes = {rank: int(file.read_text()) for rank, file in files.items() if file.exists()}
    return codes, "".join((folder / f"log-{rank}").read_text() for rank in (0, 1))


def launch_code(code: str, argv: list[str], folder, *more: str) -> subprocess.CompletedProcess:
    program = folder / "program.py"
    program.write_text(HANG.format(helpers=str(ROOT / "tests" / "helpers"), code=code))
    return subprocess.run([*LAUNCH, *more, str(program), json.dumps(argv)], capture_output=True, text=True)
