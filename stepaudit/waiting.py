"""Says where the processes of a program are while the audit waits for them.

Each process writes its stack into a file when a signal asks it: `faulthandler` needs no lock of Python for it, so it works
while the process waits in a collective, too. The stack is of the thread that the signal interrupts, the main one where nothing
is unusual: that of a thread that runs meanwhile could not be read safely.
"""

import contextlib
import faulthandler
import os
import re
import signal
import time
from pathlib import Path

FIRST_REPORT = 30  # seconds
PATIENCE = 2.0  # seconds for an answer; a process that gives none, as it is stopped, is left out
SIGNAL = getattr(signal, "SIGUSR2", None)  # Windows has none, and says nothing then


def write_stacks(folder: Path, process_index: int) -> None:
    """Write the stack of this process into a file of the folder whenever it is asked; begin with the process's number."""
    if SIGNAL is not None:
        file = (folder / f"stack-{process_index}").open("w")
        faulthandler.register(SIGNAL, file=file, all_threads=False)
        file.write(f"{os.getpid()}\n")  # only now, as the signal would have ended it before
        file.flush()


def describe_stacks(folder: Path, num_processes: int) -> str:
    """Say in which function, and at which line of the program, each process is; empty if none can tell."""
    lengths = {index: _ask(folder / f"stack-{index}") for index in range(num_processes)}
    parts, end = [], time.monotonic() + PATIENCE
    for index, length in lengths.items():
        text, before = "", None
        while length and (not text or text != before) and time.monotonic() < end:  # until nothing more is written
            before = text
            time.sleep(0.02)
            text = (folder / f"stack-{index}").read_text(errors="replace")[length:]
        frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', text)  # the innermost call comes first
        program = [(name, line) for name, line, _ in frames if is_of_program(name)]
        if frames:
            place = f"{Path(program[0][0]).name}, line {program[0][1]}" if program else Path(frames[0][0]).name
            parts.append(f"process {index} is at {place}, in {frames[0][2]}")
    return "; ".join(parts)


def _ask(path: Path) -> int:
    """Ask a process for its stack; return the length of what it had written before, 0 where it cannot be asked yet."""
    text = path.read_text(errors="replace") if path.exists() else ""
    if not text.endswith("\n"):
        return 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(text.partition("\n")[0]), SIGNAL)
    return len(text)


def is_of_program(name: str) -> bool:
    """Tell whether a file of a stack is of the program, not of the audit, of Python or of an installed package."""
    return not name.startswith((str(Path(__file__).parent), "<")) and not re.search(
        "(site|dist)-packages|/python3", name
    )
