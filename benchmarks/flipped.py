"""Train by a script from first weights of which every one differs in its last bit.

    accelerate launch benchmarks/flipped.py SCRIPT --recipe RECIPE ...

For benchmarks/stability.py.
"""

import runpy
import sys
from pathlib import Path

import torch
from torch import nn

from samestep.training import launch


def flip_last_bits(model: nn.Module) -> None:
    """Flip the last bit of every float32 weight: a change of at most 1.2e-7 of each, of which autocast keeps few."""
    for parameter in model.parameters():
        parameter.data.view(torch.int32).bitwise_xor_(1)


def main() -> None:
    script = Path(sys.argv[1])
    prepare = launch.prepare

    def prepare_flipped(accelerator, model, optimizer, *more):
        flip_last_bits(model)
        return prepare(accelerator, model, optimizer, *more)

    launch.prepare = prepare_flipped
    sys.argv = [str(script), *sys.argv[2:]]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
