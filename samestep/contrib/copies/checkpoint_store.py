"""Copies finished checkpoints to a store that outlives the machine, such as a bucket, and brings the newest one back.

The store is whatever fsspec reaches: s3://BUCKET/FOLDER, gs://..., file:///mnt/... It holds a folder checkpoint-STEP for each,
as on the disk. A copy is a checkpoint only when its manifest.json is there, which is written last, after each other file was
read back and has the SHA-256 that the manifest says. When a checkpoint is deleted, its manifest goes first. Requests that fail
are made again, after longer and longer waits; a checkpoint that cannot be copied is a warning, unless it is the last.
"""

import contextlib
import functools
import hashlib
import random
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from samestep.errors import RunError, UsageError, reason
from samestep.recipe.reading import MAX_JSON_BYTES, parse_json, read_text
from samestep.recipe.run_settings import RunSettings
from samestep.training.copies import Store

PATIENCE = 300.0
"""Seconds from the first failure of a request to giving it up."""
LONGEST_WAIT = 30.0
"""Seconds between two tries."""
TRIES = 3
"""Times that a file is brought which arrives with other bytes."""
PERMANENT = (FileNotFoundError, PermissionError, ImportError, ValueError)
"""Errors that another try does not mend."""


def open_store(accelerator: Accelerator, settings: RunSettings) -> Store:
    """Open the store of copies of checkpoints on process 0, and see that it can be read; elsewhere there is none.

    Raises:
        UsageError: it cannot be used, or holds an earlier run that is not resumed.
    """
    url = settings.checkpoint_store
    if url is None or not accelerator.is_main_process:
        return Store()
    store = CheckpointStore(url)
    if (names := store.list_checkpoints()) and not settings.resume_from_checkpoint:
        raise UsageError(
            f"checkpoint_store is {url}, which holds an earlier run (its {names[-1]}): continue it with "
            "--resume_from_checkpoint latest, or choose another folder"
        )
    return store


class CheckpointStore(Store):
    """A folder of checkpoints that fsspec reaches. Used by process 0 only.

    Args:
        url: of the folder.
        patience: see `PATIENCE`.

    Raises:
        UsageError: no such protocol, or its package is not installed.
    """

    def __init__(self, url: str, patience: float = PATIENCE):
        import fsspec  # here: it is not needed without a store

        self.url, self.patience = url.rstrip("/"), patience
        try:
            self.files, self.root = fsspec.core.url_to_fs(self.url, skip_instance_cache=True, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise UsageError(
                f"checkpoint_store is {url}, which cannot be used: {reason(error)}. For s3:// pip install s3fs, for gs:// gcsfs"
            ) from None
        self.failure: str | None = None
        self.waiting: Path | None = None
        self.lines: list[Path] = []
        self.doomed: set[str] = set()
        self.is_closing = False
        self.change = threading.Condition()
        self.thread: threading.Thread | None = None
        self.busy: str | None = None

    # -----------------------------------------------------------------------------------------------------------------
    # To the store

    def add(self, folder: Path, lines: Iterable[Path] = ()) -> None:
        """Copy a checkpoint in the background; a copy that is under way comes first, one that waits is replaced.

        Args:
            folder: of the checkpoint.
            lines: files beside it, such as metrics.jsonl, that are copied before it.
        """
        with self.change:
            self.waiting, self.lines = folder, list(lines)
            if self.thread is None:
                self.thread = threading.Thread(target=self._copy_all, daemon=True, name="checkpoint store")
                self.thread.start()
            self.change.notify_all()

    @property
    def held_names(self) -> set[str]:
        """Names of the checkpoints that must not be deleted yet: one is being copied, one waits for that."""
        with self.change:
            return {name for name in (self.busy, self.waiting and self.waiting.name) if name}

    def delete(self, names: Iterable[str]) -> None:
        """Delete copies of checkpoints when the next one is copied, as far as the store lets us."""
        with self.change:
            self.doomed |= set(names)

    def delete_doomed(self) -> None:
        """Delete the copies that `delete` has named."""
        with self.change:
            names, self.doomed = self.doomed, set()
        for name in names:
            with contextlib.suppress(Exception):
                self._insist(functools.partial(self.files.rm_file, f"{self.root}/{name}/manifest.json"))
            with contextlib.suppress(Exception):
                self._insist(functools.partial(self.files.rm, f"{self.root}/{name}", recursive=True))

    def close(self) -> None:
        """Wait until the last checkpoint is copied.

        Raises:
            RunError: it could not be copied.
        """
        with self.change:
            self.is_closing = True
            self.change.notify_all()
        if self.thread is not None:
            self.thread.join()
        if self.failure is not None:
            raise RunError(self.failure)

    def _copy_all(self) -> None:
        while True:
            with self.change:
                self.busy = None
                while self.waiting is None:
                    if self.is_closing:
                        return
                    self.change.wait()
                folder, lines, self.waiting = self.waiting, self.lines, None
                self.busy = folder.name
            try:
                self.copy(folder, lines)
                self.failure = None
                self.delete_doomed()
            except Exception as error:  # of any library of a store
                if not folder.exists():
                    continue
                self.failure = f"{folder.name} could not be copied to {self.url} ({reason(error)})"
                tqdm.write(f"WARNING: {self.failure}. Training goes on", file=sys.stderr)

    def copy(self, folder: Path, lines: Iterable[Path] = ()) -> None:
        """Copy a checkpoint, its manifest last; see `add`."""
        manifest = read_text(folder / "manifest.json", f"{folder.name}/manifest.json", MAX_JSON_BYTES).encode()
        target = f"{self.root}/{folder.name}"
        for path in lines:
            if path.exists():
                self._insist(functools.partial(self._put, path.read_bytes(), f"{self.root}/{path.name}"))
        if self._read_manifest(folder.name) == manifest:
            return
        self._insist(lambda: self.files.makedirs(target, exist_ok=True))
        for name, entry in parse_json(manifest, f"{folder.name}/manifest.json")["files"].items():
            self._insist(functools.partial(self._copy_file, folder / name, f"{target}/{name}", entry["sha256"]))
        self._insist(lambda: self._put(manifest, f"{target}/manifest.json"))

    def _copy_file(self, path: Path, target: str, digest: str) -> None:
        self.files.put_file(str(path), target)
        if self._hash(target) != digest:
            raise OSError(f"{path.name} was read back with other bytes")

    def _put(self, content: bytes, target: str) -> None:
        self.files.pipe_file(target, content)
        if self.files.cat_file(target) != content:
            raise OSError(f"{target} was read back with other bytes")

    def _hash(self, target: str) -> str:
        with self.files.open(target, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    # -----------------------------------------------------------------------------------------------------------------
    # From the store

    def list_checkpoints(self) -> list[str]:
        """List the names of the checkpoints that are there as a whole, oldest first.

        Raises:
            UsageError: the store cannot be read.
        """
        try:
            paths = self._insist(self._find_manifests)
        except Exception as error:  # of any library of a store
            raise UsageError(
                f"checkpoint_store is {self.url}, which cannot be read: {reason(error)}. Check its name, the network and the "
                "credentials"
            ) from None
        found = [re.search(r"/checkpoint-(0|[1-9][0-9]*)/manifest\.json$", path) for path in paths]
        return [f"checkpoint-{step}" for step in sorted(int(match[1]) for match in found if match)]

    def _find_manifests(self) -> list[str]:
        try:
            return [path for path in self.files.find(self.root) if path.endswith("/manifest.json")]
        except FileNotFoundError:
            return []

    def bring(self, name: str, folder: Path) -> None:
        """Bring a checkpoint into a new folder, which `checkpoint.verify` then checks.

        Raises:
            OSError: a file cannot be read, or what is there is no checkpoint.
        """
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            manifest = self._insist(lambda: self._cat_manifest(name))
            for file, entry in parse_json(manifest, "manifest.json")["files"].items():
                if Path(file).name != file:
                    raise ValueError(f"{file!r} is no name of a file")
                for _ in range(TRIES):
                    self._insist(
                        functools.partial(self.files.get_file, f"{self.root}/{name}/{file}", str(folder / file))
                    )
                    if _hash(folder / file) == entry["sha256"]:
                        break
            (folder / "manifest.json").write_bytes(manifest)
        except Exception as error:  # of any library of a store
            raise OSError(reason(error)) from None

    def bring_lines(self, path: Path) -> None:
        """Bring a file such as metrics.jsonl, if it is there.

        Raises:
            OSError: it cannot be read.
        """
        try:
            content = self._insist(lambda: self.files.cat_file(f"{self.root}/{path.name}"))
        except FileNotFoundError:
            return
        except Exception as error:  # of any library of a store
            raise OSError(reason(error)) from None
        partial = path.with_suffix(".partial")
        partial.write_bytes(content)
        partial.replace(path)

    def _read_manifest(self, name: str) -> bytes | None:
        try:
            return self._insist(lambda: self._cat_manifest(name))
        except FileNotFoundError:
            return None

    def _cat_manifest(self, name: str) -> bytes:
        """Return a manifest that is there, no more of it than can be one."""
        return self.files.cat_file(f"{self.root}/{name}/manifest.json", end=MAX_JSON_BYTES + 1)

    def _insist(self, request: Callable[[], Any]) -> Any:
        """Make a request until it succeeds; wait longer each time, by chance a little more or less."""
        first_failure, wait = None, 0.1
        while True:
            try:
                return request()
            except Exception as error:  # of any library of a store
                first_failure = first_failure or time.monotonic()
                if isinstance(error, PERMANENT) or time.monotonic() - first_failure > self.patience:
                    raise
            time.sleep(wait * random.uniform(0.5, 1.5))
            wait = min(2 * wait, LONGEST_WAIT)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
