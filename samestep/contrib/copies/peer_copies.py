"""Keeps every checkpoint on every machine, so that the loss of a machine with its disk loses none, and no storage is needed.

With --replicate_checkpoints each machine has an output folder of its own: on its disk, or in memory (/dev/shm). Process 0
writes a checkpoint into its machine's folder, and sends the files, and the lines of the steps before it, to one process of each
other machine, over gloo and in the background where checkpoints are written there. A copy becomes a checkpoint when every byte
has the SHA-256 of the manifest. When a run goes on, machines that were there or not, the newest whole checkpoint that any of
them holds is sent to those that lack it.
"""

import datetime
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object

from samestep.recipe.run_settings import RunSettings
from samestep.training import checkpoint
from samestep.training.copies import Peers

BLOCK = 2**26
"""Bytes of a message."""


def find_peers(accelerator: Accelerator, settings: RunSettings) -> Peers:
    """Find the machines that keep copies of checkpoints. Called by all processes."""
    return PeerCopies(accelerator, Path(settings.output_dir), checkpoint.LINES, settings.ddp_timeout)


class PeerCopies(Peers):
    """The machines' copies. Made, and `share_newest` called, by all processes; the rest by one process of each machine.

    Args:
        accelerator: the run's.
        output_dir: of this machine.
        lines: names of files beside the checkpoints that go with them.
        timeout: seconds that a message may take.
    """

    def __init__(self, accelerator: Accelerator, output_dir: Path, lines: Iterable[str], timeout: float):
        self.accelerator, self.output_dir, self.lines = accelerator, output_dir, tuple(lines)
        self.is_member = accelerator.is_local_main_process
        self.group = None
        members = gather_object([accelerator.process_index] * self.is_member)
        if len(members) > 1:
            group = dist.new_group(members, datetime.timedelta(seconds=timeout), "gloo")
            self.group = group if self.is_member else None

    def find_here(self, checkpoint: Path) -> Path:
        return self.output_dir / checkpoint.name

    def share_newest(self, find_newest: Callable[[], int], verify: Callable[[Path], Any]) -> None:
        """Give all machines the newest whole checkpoint that one of them holds.

        Args:
            find_newest: returns the step of the newest whole checkpoint in this machine's folder; -1: there is none.
            verify: raises where a checkpoint is not whole.
        """
        own = find_newest() if self.is_member else -1
        newest = gather_object([(own, -self.accelerator.process_index)])
        step, holder = max(newest)
        if step < 0 or self.group is None:
            return
        folder = self.output_dir / f"checkpoint-{step}"
        if self.accelerator.process_index == -holder:
            self.send(folder, -holder)
        else:
            self.receive(verify, -holder, is_wanted=own != step)

    def send(self, folder: Path | None, source: int = 0) -> None:
        """Send a checkpoint of this process, the source, to the other machines; None: there is none to send."""
        if self.group is None:
            return
        paths = [] if folder is None else [path for path in sorted(folder.iterdir()) if path.is_file()]
        lines = [] if folder is None else [path for name in self.lines if (path := folder.with_name(name)).exists()]
        # A line that is appended meanwhile is not sent
        sizes = {path: path.stat().st_size for path in [*paths, *lines]}
        header = None
        if folder is not None:
            header = folder.name, {p.name: sizes[p] for p in paths}, {p.name: sizes[p] for p in lines}
        dist.broadcast_object_list([header], source, self.group)
        for path, size in sizes.items():
            with path.open("rb") as file:
                for begin in range(0, size, BLOCK):
                    block = bytearray(file.read(min(BLOCK, size - begin)))
                    dist.broadcast(torch.frombuffer(block, dtype=torch.uint8), source, self.group)

    def receive(self, verify: Callable[[Path], Any], source: int = 0, is_wanted: bool = True) -> Path | None:
        """Receive what the source sends, and make a checkpoint of it; return its folder, None if there is none.

        Args:
            verify: raises where a checkpoint is not whole.
            source: process that sends.
            is_wanted: whether to keep it; this machine may hold it already.
        """
        if self.group is None:
            return None
        headers: list[Any] = [None]
        dist.broadcast_object_list(headers, source, self.group)
        if headers[0] is None:
            return None
        name, files, lines = headers[0]
        folder, partial = self.output_dir / name, self.output_dir / f".{name}.partial"
        new_lines = {self.output_dir / f"{file_name}.partial": self.output_dir / file_name for file_name in lines}
        sizes = {partial / file_name: size for file_name, size in files.items()}
        sizes |= {path: lines[target.name] for path, target in new_lines.items()}
        problem: OSError | None = None
        if is_wanted:
            shutil.rmtree(partial, ignore_errors=True)
        for path, size in sizes.items():
            blocks = self._receive_blocks(size, source)
            try:
                if is_wanted and problem is None:
                    _write(path, blocks)
            except OSError as error:
                problem = error
            for _ in blocks:  # the rest of it, whatever becomes of it: the source sends on
                pass
        if not is_wanted:
            return folder
        try:
            if problem is not None:
                raise problem
            verify(partial)
            for path, target in new_lines.items():
                path.replace(target)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            for path in new_lines:
                path.unlink(missing_ok=True)
            print(f"WARNING: {name} could not be copied to {self.output_dir} ({error})", file=sys.stderr, flush=True)
            return None
        return folder

    def _receive_blocks(self, size: int, source: int) -> Iterator[bytes]:
        """Receive a file of `size` bytes, block by block."""
        for begin in range(0, size, BLOCK):
            block = torch.empty(min(BLOCK, size - begin), dtype=torch.uint8)
            dist.broadcast(block, source, self.group)
            yield block.numpy().tobytes()


def _write(path: Path, blocks: Iterable[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for block in blocks:
            file.write(block)
