"""A training in a terminal that is closed in the middle of a step; a fork server imports this, which is waited for once."""

import os
import pty
import signal

from blank import draw_nothing
from common import load_script
from waiting import until

from samestep.errors import exit_code
from samestep.step import accumulate

SCRIPT = load_script("pretrain_bert")
SIGN, STEP = b"in the middle", 4


def main(folder: str, kind: str, *argv: str) -> None:
    """Train, and write the exit code into `folder`/code.

    Args:
        folder: where the results go.
        kind: `SIGHUP`: the terminal is closed. `nohup`: it is closed, but SIGHUP ignored, and stdout a pipe whose reader ends.
        argv: of the script.
    """
    reader, pipe = os.pipe()
    pid, terminal = pty.fork()  # the child leads a session with this terminal, to which the kernel sends SIGHUP
    if not pid:
        os.close(reader)
        if kind == "nohup":
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            os.dup2(pipe, 1)
        os.close(pipe)
        _train(list(argv))
    os.close(pipe)
    seen = b""
    while SIGN not in seen:
        seen += os.read(terminal, 1000)
    os.close(reader)
    os.close(terminal)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with open(f"{folder}/code", "w") as file:
        file.write(str(code))
    os._exit(0)


def _train(argv: list[str]) -> None:
    draw_nothing()
    seed_noise = accumulate.seed_noise

    def wait(accelerator, seed: int, step: int) -> None:
        if step == STEP - 1:
            os.write(2, SIGN)
            until(lambda: not os.isatty(2), "end of the terminal")
        seed_noise(accelerator, seed, step)

    accumulate.seed_noise = wait
    code = exit_code(lambda: SCRIPT.main(argv))
    print("the end", flush=True)  # as Python's own end writes what is left
    os._exit(code)
