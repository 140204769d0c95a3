"""nanoGPT's own train.py, unchanged but for a stamp after every optimizer step: STAMPS UNITS train.py FLAGS.

UNITS are the tokens of a step. Its loss is not read.
"""

import math
import runpy
import sys

from clock import Clock
from torch.optim.optimizer import register_optimizer_step_post_hook

if __name__ == "__main__":
    clock, units = Clock(sys.argv[1]), int(sys.argv[2])

    def stamp(*_) -> None:
        clock.collated(units)
        clock.step(math.nan)

    register_optimizer_step_post_hook(stamp)
    sys.argv = sys.argv[3:]
    sys.path.insert(0, "")  # where train.py finds its model
    runpy.run_path(sys.argv[0], run_name="__main__")
