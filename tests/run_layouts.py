"""Run by `accelerate launch`: several trainings, one after the other, on the same processes."""

import gc
import json
import sys

import matplotlib.figure
from accelerate import PartialState
from blank import write_blank
from common import fresh_accelerator, load_script

if __name__ == "__main__":
    matplotlib.figure.Figure.savefig = write_blank
    # `end_training` would end the process group, which the next training needs.
    PartialState.destroy_process_group = lambda self, group=None: None
    calls = json.loads(sys.argv[1])
    scripts = {program: load_script(program) for program, *_ in calls}
    gc.freeze()  # as in conftest.py
    for program, *argv in calls:
        fresh_accelerator()
        scripts[program].main(argv)
