"""Run by `accelerate launch`: several trainings, one after the other, on the same processes."""

import json
import sys

from accelerate import PartialState
from common import fresh_accelerator, load_script

if __name__ == "__main__":
    # `end_training` would end the process group, which the next training needs.
    PartialState.destroy_process_group = lambda self, group=None: None
    for program, *argv in json.loads(sys.argv[1]):
        fresh_accelerator()
        load_script(program).main(argv)
