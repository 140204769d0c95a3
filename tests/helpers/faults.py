"""Faults that a run must survive or report: memory that runs out, a process that does something in the middle of a step."""

import contextlib
import json
import subprocess
import sys

import torch
from common import ROOT, count_samples

LAUNCH = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--config_file"),
    *(str(ROOT / "accelerate_configs" / "2xcpu.yaml"), "--main_process_port", "0", "--mixed_precision", "no"),
]
HANG = """
import json, os, signal, sys, time
sys.path.insert(0, {helpers!r})
from common import load_script
from samestep.step import accumulate
seed_noise = accumulate.seed_noise
def note(accelerator, seed, step):
    if step == 3 and accelerator.process_index == 1:
        {code}
    seed_noise(accelerator, seed, step)
accumulate.seed_noise = note
from samestep.errors import exit_code
sys.exit(exit_code(lambda: load_script("pretrain_bert").main(json.loads(sys.argv[1]))))
"""


@contextlib.contextmanager
def limit_memory(monkeypatch, scripts, program: str, num_samples, grad_only: bool = True):
    """Let micro-batches of more than `num_samples()` samples run out of memory."""
    forward = scripts[program].PretrainingSums.forward

    def limited(self, **micro_batch):
        if torch.is_grad_enabled() and count_samples(micro_batch) > num_samples():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, **micro_batch)

    with monkeypatch.context() as patch:
        patch.setattr(scripts[program].PretrainingSums, "forward", limited)
        yield


def launch_code(code: str, argv: list[str], folder, *more: str, timeout: float = 100) -> subprocess.CompletedProcess:
    program = folder / "program.py"
    program.write_text(HANG.format(helpers=str(ROOT / "tests" / "helpers"), code=code))
    return subprocess.run(
        [*LAUNCH, *more, str(program), json.dumps(argv)], capture_output=True, text=True, timeout=timeout
    )
