"""One process of benchmarks/proof_gpu.py: PART ROWS SESSION full|tiny ITEM ..., or train PROGRAM FLAG ... under torchrun.

It appends a line to ROWS as soon as an item is computed, so that nothing is lost when it is ended. After an item that failed it
ends: what a kernel left on the device could make the others fail, too.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
# In place of this folder, whose modules are called by the package's name
sys.path[:1] = [str(path) for path in (BENCHMARKS, BENCHMARKS.parent / "tests" / "helpers", BENCHMARKS.parent)]

from proof import tasks
from samestep.errors import UsageError


def append(file: Path, row: dict) -> None:
    """Append a row as one whole line."""
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, (json.dumps(row) + "\n").encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(part: str, file: str, session: str, size: str, *items: str) -> int:
    module = importlib.import_module(f"proof.{part}")
    for item in items:
        begin, row = time.perf_counter(), {"part": part, "item": item, "session": int(session)}
        try:
            row |= module.compute(item, size == "tiny")
        except UsageError as error:
            row["refused"] = tasks.line(error)
        except Exception as error:
            traceback.print_exc()
            row["failed"] = f"{type(error).__name__}: {tasks.line(error)}"
        append(Path(file), row | {"seconds": round(time.perf_counter() - begin, 1)})
        if "failed" in row:
            return 1
    return 0


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends when whoever has started it does
    if sys.argv[1] == "train":
        tasks.run_rank(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main(*sys.argv[1:]))
