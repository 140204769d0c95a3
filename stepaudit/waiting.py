"""Says where the processes of a program are while the audit waits for them.

Each process writes its stack into a file every `SECONDS` after its imports, by a thread of `faulthandler` that needs no lock of
Python: it works while the process waits in a collective, too. They are read less often, so that all have written one by then.
"""

import faulthandler
import re
from pathlib import Path

SECONDS = 20  # no run that is shorter is dumped: a stack that is read while it runs can end the process
FIRST_REPORT = 30  # seconds


def write_stacks(folder: Path, process_index: int) -> None:
    """Write the stack of this process into a file of the folder, now and then, until it ends."""
    file = (folder / f"stack-{process_index}").open("w")
    faulthandler.dump_traceback_later(SECONDS, repeat=True, file=file)


def describe_stacks(folder: Path, num_processes: int) -> str:
    """Say in which function, and at which line of the program, each process was when it wrote its stack; empty if none has."""
    parts = []
    for process_index in range(num_processes):
        path = folder / f"stack-{process_index}"
        text = path.read_text(errors="replace") if path.exists() else ""
        stacks = text.split("Timeout (")[1:]
        # The newest one that another follows is whole. In it the main thread is the last, and the innermost call comes first.
        stack = stacks[-2] if len(stacks) > 1 else "".join(stacks)
        frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', stack.rpartition("Thread 0x")[2])
        program = [(name, line) for name, line, _ in frames if _is_of_program(name)]
        if frames:
            place = f"{Path(program[0][0]).name}, line {program[0][1]}" if program else Path(frames[0][0]).name
            parts.append(f"process {process_index} is at {place}, in {frames[0][2]}")
    return "; ".join(parts)


def _is_of_program(name: str) -> bool:
    return not name.startswith((str(Path(__file__).parent), "<")) and not re.search(
        "(site|dist)-packages|/python3", name
    )
