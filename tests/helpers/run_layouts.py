"""Several trainings, one after the other, on the same processes; a fork server imports this, which is waited for once."""

import contextlib
import gc
import json
import os

from accelerate import PartialState
from blank import draw_nothing
from common import ROOM_TINIES, TINIES, fresh_accelerator, load_script
from torch.nn.parallel import DistributedDataParallel

SCRIPTS = {program: load_script(program) for program in TINIES | ROOM_TINIES}
with contextlib.suppress(ImportError):  # older versions have none
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping(
        "bert"
    )  # makes the names of all models, once and not for each process's first result


def end(state: PartialState, group=None) -> None:
    """Replace the end of the process group in `end_training`: the next training needs the group."""
    alive = [item for item in gc.get_objects() if isinstance(item, DistributedDataParallel)]
    assert not any(hasattr(item, "reducer") for item in alive), (
        "DDP would be destroyed after its process group, and wait for gloo for ever"
    )


def main(folder: str, calls: str) -> None:
    """Train as `calls` says, [[PROGRAM, ARGUMENT, ...], ...] in JSON, and end the process. `folder` has its output."""
    draw_nothing()
    PartialState.destroy_process_group = end
    for program, *argv in json.loads(calls):
        fresh_accelerator()
        SCRIPTS[program].main(argv)
    os._exit(0)
