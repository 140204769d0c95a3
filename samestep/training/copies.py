"""The places of checkpoints beside the output folder: none. What else there is enters by `samestep.training.ways`."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Store:
    """A place that outlives the machine, of process 0: this one keeps nothing."""

    url = ""

    @property
    def held_names(self) -> set[str]:
        """Names of the checkpoints that must not be deleted yet."""
        return set()

    def add(self, folder: Path, lines: Iterable[Path] = ()) -> None:
        """Copy a checkpoint, and before it the files beside it, such as metrics.jsonl."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete copies of checkpoints when the next one is copied."""

    def delete_doomed(self) -> None:
        """Delete the copies that `delete` has named."""

    def close(self) -> None:
        """Wait until the last checkpoint is copied. Raises RunError if it could not be."""

    def list_checkpoints(self) -> list[str]:
        """List the names of the whole copies."""
        return []

    def bring(self, name: str, folder: Path) -> None:
        """Bring one of `list_checkpoints` into a folder."""
        raise NotImplementedError

    def bring_lines(self, path: Path) -> None:
        """Bring a file from beside the checkpoints."""
        raise NotImplementedError


class Peers:
    """Other machines, each with an output folder of its own: here all see one folder.

    Attributes:
        is_member: whether this process keeps the folder of its machine.
    """

    is_member = False

    def share_newest(self, find_newest: Callable[[], int], verify: Callable[[Path], Any]) -> None:
        """Give all machines the newest whole checkpoint that one of them holds."""

    def find_here(self, checkpoint: Path) -> Path:
        """Find this machine's copy of process 0's checkpoint."""
        return checkpoint

    def send(self, folder: Path | None) -> None:
        """Send a checkpoint of process 0 to the other machines; None: there is none to send."""

    def receive(self, verify: Callable[[Path], Any]) -> Path | None:
        """Receive what process 0 sends; return the folder that it became, None if there is none."""
        return None


class Copies(NamedTuple):
    """The places of a run's checkpoints, beside the output folder.

    Attributes:
        store: gets a copy of each checkpoint; process 0's.
        peers: other machines, which get a copy of each.
    """

    store: Store = Store()
    peers: Peers = Peers()
