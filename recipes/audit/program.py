"""Runs a program as `python PROGRAM ARGS` would, and records it: python -m recipes.audit.program FOLDER STEPS PROGRAM ARGS"""

import os
import sys
import traceback
import types
from pathlib import Path

from recipes.audit.record import Enough, Recorder


def main(folder: str, num_steps: str, program: str, *argv: str) -> None:
    sys.argv = [program, *argv]
    sys.path[0] = str(Path(program).resolve().parent)
    # Not runpy's, which empties the module at the end: DDP must not be destroyed after its process group.
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = program
    recorder, code = Recorder(int(num_steps)), 0
    try:
        with recorder:
            exec(compile(Path(program).read_bytes(), program, "exec"), module.__dict__)
    except Enough:
        pass
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)  # as Python does
    except BaseException:
        traceback.print_exc()
        code = 1
    recorder.recording.save(Path(folder) / f"0-{recorder.recording.process_index}.npz")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what the program would do after its end (threads, process groups) does not concern us


if __name__ == "__main__":
    main(*sys.argv[1:])
