"""Run by `accelerate launch`: several trainings, one after the other, on the same processes."""

import gc
import json
import sys

import matplotlib.figure
from accelerate import PartialState
from blank import write_blank
from common import fresh_accelerator, load_script
from torch.nn.parallel import DistributedDataParallel


def end(state: PartialState, group=None) -> None:
    """What `end_training` does in the place of ending the process group, which the next training needs."""
    alive = [one for one in gc.get_objects() if isinstance(one, DistributedDataParallel)]
    assert not alive, "DDP would be destroyed after its process group, and wait for gloo for ever"


if __name__ == "__main__":
    matplotlib.figure.Figure.savefig = write_blank
    PartialState.destroy_process_group = end
    calls = json.loads(sys.argv[1])
    scripts = {program: load_script(program) for program, *_ in calls}
    gc.freeze()  # as in conftest.py
    for program, *argv in calls:
        fresh_accelerator()
        scripts[program].main(argv)
