"""Copies of checkpoints on two machines, each a process with a folder of its own: what one gets of what the other sends."""

import os
import resource
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator

LINES, SIZE = "metrics.jsonl", 2**20
"""Name of the file of lines; bytes of weights, above those of the log."""


def main(folder: str) -> None:
    """Send four checkpoints from machine 0 to machine 1, then the newest one from 1 to 0; write what each has afterwards."""
    from samestep.contrib.copies.peer_copies import PeerCopies

    os.environ["LOCAL_RANK"] = "0"
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    machine = Path(folder) / f"machine-{rank}"
    machine.mkdir()
    peers = PeerCopies(accelerator, machine, [LINES], timeout=60)
    found = {}

    def send(step: int, content: str | None = None, receive: Callable = peers.receive) -> None:
        """Send a checkpoint with some lines, and note what the other machine has made of it."""
        if rank == 0:
            write_checkpoint(machine, step, content)
            (machine / LINES).write_text(f"lines of {step}\n")
            peers.send(machine / f"checkpoint-{step}")
        else:
            got = receive(verify)
            found[step] = (
                got and got.name,
                sorted(path.name for path in machine.iterdir()),
                (machine / LINES).read_text(),
            )

    def receive_on_a_full_disk(verify: Callable) -> Path | None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE - 1, limits[1]))
        try:
            return peers.receive(verify)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    send(2)
    send(4, "other bytes than those of step 4")
    send(6, receive=receive_on_a_full_disk)
    send(8)
    if rank == 1:
        write_checkpoint(machine, 10)
    peers.share_newest(lambda: 10 if rank == 1 else 8, verify)
    found["newest"] = sorted(path.name for path in machine.iterdir())
    torch.save(found, Path(folder) / f"{rank}.pt")
    accelerator.end_training()
    os._exit(0)


def write_checkpoint(machine: Path, step: int, content: str | None = None) -> None:
    folder = machine / f"checkpoint-{step}"
    folder.mkdir()
    (folder / "weights").write_text((content or f"weights of {step}").ljust(SIZE))
    (folder / "empty").touch()


def verify(folder: Path) -> None:
    """Raise where a checkpoint, which may still be on its way, has other weights than those of its step."""
    step = folder.name.removeprefix(".").removesuffix(".partial").removeprefix("checkpoint-")
    if (folder / "weights").read_text() != f"weights of {step}".ljust(SIZE) or not (folder / "empty").exists():
        raise ValueError("it is damaged")
