"""Trainings in which memory runs out; a fork server imports this, which is waited for once.

From the fifth step on (`second`: the second, in which DDP arranges its buckets anew) the PROCESS cannot compute micro-batches
of more than 2 samples: it fails in the `forward`, in the `backward` of a micro-batch that is not the last, or in the last
one's, the `synchronising` one, after DDP has begun to reduce. `always`: it never can, and learns so before the first step.
"""

import functools
import gc
import json
import os
import sys
from collections.abc import Callable

import torch
from accelerate import PartialState
from accelerate.state import GradientState
from blank import draw_nothing
from common import count_samples, fresh_accelerator, load_script, model_of

from samestep.step import accumulate
from samestep.training import capacity, launch, recovery

MAX_SAMPLES = 2


def limit_memory(model_class: type, process: int, kind: str) -> Callable[[], None]:
    """Let memory run out as `kind` says, after `prepare`; return what ends that."""
    first = 1 if kind == "second" else 4
    steps, forward = [], model_class.forward

    def note_step(accelerator, seed, step):
        steps.append(step)
        seed_noise(accelerator, seed, step)

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def limited(self, **micro_batch):
        is_late = kind == "always" or (steps and steps[-1] >= first)
        too_big = (
            torch.is_grad_enabled()
            and is_late
            and PartialState().process_index == process
            and count_samples(micro_batch) > MAX_SAMPLES
        )
        if too_big and kind in ("forward", "second", "always"):
            fail()
        hook = None
        if too_big and kind == ("synchronising" if GradientState().sync_gradients else "backward"):
            # The first layers are the last in the backward.
            layer = [module for module in self.modules() if isinstance(module, torch.nn.LayerNorm)][1]
            hook = layer.register_forward_hook(lambda module, inputs, output: output.register_hook(fail) and None)
        result = forward(self, **micro_batch)
        if hook is not None:
            hook.remove()
        return result

    def restore():
        accumulate.seed_noise, model_class.forward = seed_noise, forward

    accumulate.seed_noise, model_class.forward = note_step, limited
    return restore


def say_how_many_reductions_had_begun(self, error):
    print(
        f"\nreductions begun: {self.recovery.count_collectives() - self.first_collective}", file=sys.stderr, flush=True
    )
    leave(self, error)


def prepare() -> None:
    """Let failures find reductions that have begun, and say how many."""
    global seed_noise, leave
    seed_noise, leave = accumulate.seed_noise, recovery.Attempt._leave_in_good_order
    recovery.Attempt._leave_in_good_order = say_how_many_reductions_had_begun
    # Many small buckets, so that some are being reduced when the backward fails.
    launch.DistributedDataParallelKwargs = functools.partial(launch.DistributedDataParallelKwargs, bucket_cap_mb=0.01)


def main(folder: str, program: str, process: str, runs: str) -> None:
    """Train as `runs` says, [[KIND, ARGV], ...] in JSON, and end the process. `folder` has its output."""
    draw_nothing()
    prepare()
    # `end_training` would end the process group, which the next training needs.
    PartialState.destroy_process_group = lambda self, group=None: None
    script = load_script(program)
    gc.freeze()  # as in conftest.py
    for number, (kind, argv) in enumerate(json.loads(runs)):
        fresh_accelerator()
        capacity.FILE = capacity.FILE.with_name(f"{number}.json")  # what one run learns must not help the next
        restore = limit_memory(model_of(program), int(process), kind)
        script.main(argv)
        restore()
    os._exit(0)
