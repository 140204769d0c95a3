"""Train as run_layouts.py does, but memory runs out: python run_with_fault.py PROGRAM KIND PROCESS ARGV (a JSON list).

From the fifth step on the PROCESS cannot compute cells of more than 2 samples: it fails in the `forward`, in the `backward` of
a micro-step that is not the last, or in the last one's, the `synchronising` one, after DDP has begun to reduce.
"""

import functools
import json
import sys

import torch
from accelerate.state import GradientState, PartialState
from common import load_script

from recipes import accumulate, launch

MAX_SAMPLES = 2


def main(program: str, kind: str, process: int, argv: list[str]) -> None:
    script = load_script(program)
    steps, seed_noise, forward = [], accumulate.seed_noise, script.PretrainingSums.forward
    # Many small buckets, so that some are being reduced when the backward fails.
    launch.DistributedDataParallelKwargs = functools.partial(launch.DistributedDataParallelKwargs, bucket_cap_mb=0.01)

    def note_step(accelerator, seed, step):
        steps.append(step)
        seed_noise(accelerator, seed, step)

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def limited(self, input_ids, *arguments, **named):
        is_late = torch.is_grad_enabled() and steps and steps[-1] >= 4
        too_big = is_late and PartialState().process_index == process and len(input_ids) > MAX_SAMPLES
        if too_big and kind == "forward":
            fail()
        is_last = GradientState().sync_gradients
        layers = [module for module in self.modules() if isinstance(module, torch.nn.LayerNorm)]
        hook = None
        if too_big and kind == ("synchronising" if is_last else "backward"):
            # The first layers are the last in the backward.
            hook = layers[1].register_forward_hook(lambda module, given, output: output.register_hook(fail) and None)
        result = forward(self, input_ids, *arguments, **named)
        if hook is not None:
            hook.remove()
        return result

    accumulate.seed_noise, script.PretrainingSums.forward = note_step, limited
    sys.exit(script.main(argv))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))
