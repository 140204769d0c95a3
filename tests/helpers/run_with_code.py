"""Trainings in which something is done first, such as a patch; a fork server imports this, which is waited for once."""

import os
import sys
from pathlib import Path

from blank import draw_nothing
from common import load_script

from samestep import interrupt
from samestep.errors import exit_code

SCRIPT = load_script("pretrain_bert")


def main(folder: str, code: str, *argv: str) -> None:
    """Execute `code`, train, write the exit code into `folder`/code-RANK, and end the process.

    For the server a process that has been stopped ends well, so that it waits for the other. One that fails ends both, as a
    launcher does.
    """
    end = os._exit

    def note(status: int) -> None:
        sys.stderr.flush()
        (Path(folder) / f"code-{os.environ['RANK']}").write_text(str(status))
        end(0 if status == interrupt.RESTART else status)

    os._exit = note  # by which failing runs end
    draw_nothing()
    exec(code, {"folder": folder})
    os._exit(exit_code(lambda: SCRIPT.main(list(argv))))
