"""`accelerate launch` in forked processes, one for each machine: its own imports are waited for once, its workers' are not."""

import json
import os
import sys
import traceback
from pathlib import Path

from accelerate.commands import launch


def main(folder: str, environment: str, *commands: str) -> None:
    """Launch in `folder`, write the exit code into code-RANK, and end the process.

    Args:
        folder: has what is printed, in log-RANK.
        environment: all variables, in JSON.
        commands: of each machine the launcher's arguments, in JSON.
    """
    rank, code = int(os.environ.get("RANK", 0)), 0
    os.environ.clear()
    os.environ.update(json.loads(environment))
    os.chdir(folder)
    sys.argv = ["launch", *json.loads(commands[rank])]
    try:
        launch.main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    Path(folder, f"code-{rank}").write_text(str(code))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
