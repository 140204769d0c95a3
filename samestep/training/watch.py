"""Serves a page that shows runs while they train: curves, speed, events, digests, by the lines of their metrics.jsonl.

The page polls this program, which reads what a run appended since. Needs no torch and no network; it listens on 127.0.0.1.
templates/watch.html.j2, its style and its script decide how the page looks; this module computes what it shows.
"""

import contextlib
import http.server
import itertools
import json
import math
import time
import urllib.parse
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from samestep.errors import UsageError
from samestep.planner.page import TEMPLATES as SHARED_TEMPLATES
from samestep.planner.page import make_environment
from samestep.recipe.reading import format_name, read_json, read_yaml

TEMPLATES = Path(__file__).parent / "templates"
MOST_POINTS = 600
"""Points of a curve that a page draws: more than it has pixels on a phone, and fast to draw."""
MOST_EVENTS = 50
"""Events that a page lists, the newest."""
NO_CURVES = {"step", "epoch", "samples", "tokens", "images", "event", "digest", "skipped", "images_per_second"}
NO_CURVES |= {"slowest_process"}
"""Fields of a line that are not drawn as they are."""


class Curve:
    """Values of one name by step, thinned for a page."""

    def __init__(self) -> None:
        self.steps, self.values = array("d"), array("d")

    def add(self, step: int, value: float | None) -> None:
        self.steps.append(step)
        self.values.append(math.nan if value is None else value)

    def thin(self, most: int = MOST_POINTS) -> dict[str, list[float | None]]:
        """Return at most `most` points, each of neighbouring steps: the last `step`, and the `mean`, `low` and `high` of their
        values, to 6 digits; null where a value is not finite."""
        # Copies, as arrays that lend their memory cannot grow
        steps, values = np.array(self.steps), np.array(self.values)
        size = max(1, -(-len(values) // most))
        starts = np.arange(0, len(values), size)
        if not len(starts):
            return {"step": [], "mean": [], "low": [], "high": []}
        ends = np.append(starts[1:], len(values))
        # A value that is not finite makes its whole point null
        columns = {
            "mean": np.add.reduceat(values, starts) / (ends - starts),
            "low": np.minimum.reduceat(values, starts),
            "high": np.maximum.reduceat(values, starts),
        }
        rounded = {name: [_round(value) for value in column.tolist()] for name, column in columns.items()}
        return {"step": steps[ends - 1].tolist()} | rounded


class RunReader:
    """Reads the lines that a run appends to its metrics.jsonl, and reads all of them again when they were replaced.

    Args:
        folder: output folder of a run; it may have no step yet.

    Attributes:
        version: changes whenever anything was read.
    """

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / "metrics.jsonl"
        self.version = 0
        self._forget()

    def _forget(self) -> None:
        self.inode: int | None = None
        self.offset = 0
        self.curves: dict[str, Curve] = {}
        self.events: list[dict[str, Any]] = []
        self.digests: dict[int, str] = {}
        self.last: dict[str, Any] = {}
        self.units_per_step = "samples"
        self.changed_at: float | None = None

    def update(self) -> None:
        """Read the lines that are new. A last line without an end is left for the next time."""
        try:
            with self.path.open("rb") as file:
                status = self.path.stat()
                if (self.inode is not None and status.st_ino != self.inode) or status.st_size < self.offset:
                    self._forget()
                    self.version += 1
                self.inode = status.st_ino
                file.seek(self.offset)
                content = file.read()
        except FileNotFoundError:
            return
        content = content[: content.rfind(b"\n") + 1]
        if content:
            self.offset += len(content)
            self.changed_at = status.st_mtime
            self.version += 1
            for line in content.splitlines():
                try:
                    self._add(json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError):  # a damaged line
                    continue

    def _add(self, line: dict[str, Any]) -> None:
        step = int(line["step"])
        if "event" in line:
            self.events = [*self.events[1 - MOST_EVENTS :], line]
            return
        for name, value in line.items():
            if name in NO_CURVES or isinstance(value, bool | str):
                continue
            if name not in self.curves:
                self.curves[name] = Curve()
            self.curves[name].add(step, value)
        if "loss" in line:
            self.last = line
            unit = next((unit for unit in ("tokens", "samples") if unit in line), None)
            if unit and line.get("seconds"):
                self.units_per_step = unit
                self.curves.setdefault("speed", Curve()).add(step, line[unit] / line["seconds"])
        if "digest" in line:
            self.digests[step] = line["digest"]

    def describe(self) -> dict[str, Any]:
        """Describe the run as JSON values: its curves, thinned, and what stands in its recipe.yaml and settings.json."""
        recipe, settings = (_read_if_there(self.folder / name) for name in ("recipe.yaml", "settings.json"))
        seconds = self.curves["seconds"].values[-200:] if "seconds" in self.curves else []
        step, num_steps = self.last.get("step"), settings.get("num_steps")
        per_step = float(np.median(seconds)) if len(seconds) else None
        left = None
        if per_step and num_steps and step is not None:
            left = per_step * self._count_steps_left(step, num_steps, settings.get("batch_sizes"))
        is_over = step is not None and num_steps is not None and step >= num_steps
        return {
            "name": str(self.folder),
            "description": recipe.get("description"),
            "step": step,
            "num_steps": num_steps,
            "seconds_left": left,
            "is_over": is_over,
            "silent_seconds": None if self.changed_at is None else max(0.0, time.time() - self.changed_at),
            "seconds_per_step": per_step,
            "unit": self.units_per_step,
            "settings": {
                name: settings.get(name) for name in ("num_processes", "mixed_precision", "device", "reproducible")
            }
            | {name: recipe.get(name) for name in ("global_batch_size", "learning_rate", "seed")},
            "last": {name: value for name, value in self.last.items() if name != "digest"},
            "digest": [max(self.digests), self.digests[max(self.digests)]] if self.digests else None,
            "events": self.events[::-1],
            "curves": {name: curve.thin() for name, curve in self.curves.items() if name != "seconds"},
        }

    def _count_steps_left(self, step: int, num_steps: int, sizes: list[list[int]] | None) -> float:
        """Count the steps after `step`, in units of the last one where the batch grows: a step takes as long as its samples.

        Args:
            sizes: (steps, samples of each) of the whole training; None: all are the same.
        """
        if not sizes:
            return num_steps - step
        ends = itertools.accumulate((number for number, _ in sizes))
        left = sum(size * max(0, min(number, end - step)) for (number, size), end in zip(sizes, ends, strict=True))
        return left / max(1, self.last.get("samples", 1))


def describe(runs: Sequence[RunReader]) -> dict[str, Any]:
    """Describe runs for the page: each, and at which step the digests of two part."""
    digests = None
    if len(runs) == 2:
        common = sorted(runs[0].digests.keys() & runs[1].digests.keys())
        parting = next((step for step in common if runs[0].digests[step] != runs[1].digests[step]), None)
        digests = {"num_common": len(common), "last_common": common[-1] if common else None, "parting": parting}
    return {
        "version": [run.version for run in runs],
        "runs": [run.describe() for run in runs],
        "digests": digests,
    }


def make_page(runs: Sequence[RunReader]) -> str:
    """Write the page, with what is known now inside: style and script too, no address outside. No text of a run is markup."""
    data = json.dumps(describe(runs), allow_nan=False).replace("<", "\\u003c")  # nothing in it ends the script
    title = " and ".join(run.folder.name or str(run.folder) for run in runs)
    environment = make_environment(TEMPLATES, SHARED_TEMPLATES)
    return environment.get_template("watch.html.j2").render(title=title, data=data)


def make_readers(folders: Sequence[str]) -> list[RunReader]:
    """Make readers of output folders.

    Raises:
        UsageError: one is no folder, or no run has written to it.
    """
    for folder in folders:
        if not Path(folder).is_dir():
            raise UsageError(f"{format_name(folder)} is no folder: give the output_dir of a training")
        if not _is_run(Path(folder)):
            inside = [
                format_name(str(path)) for path in sorted(Path(folder).iterdir()) if path.is_dir() and _is_run(path)
            ]
            remedy = f"name one of {', '.join(inside[:5])}" if inside else "give the output_dir of a training"
            raise UsageError(f"{format_name(folder)} is no run: {remedy}")
    return [RunReader(Path(folder)) for folder in folders]


def make_server(runs: Sequence[RunReader], port: int) -> http.server.ThreadingHTTPServer:
    """Make the server of the page, on 127.0.0.1; `serve_forever` runs it.

    Args:
        runs: what it shows.
        port: 0 takes any that is free.

    Raises:
        UsageError: the port is not free.
    """
    import threading

    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
            if host not in ("127.0.0.1", "localhost"):  # another site's name that leads here (DNS rebinding)
                self._answer(403, "text/plain", "ask for localhost or 127.0.0.1\n")
            elif url.path == "/":
                with lock:
                    self._update()
                    page = make_page(runs)
                self._answer(200, "text/html", page)
            elif url.path == "/data.json":
                with lock:
                    self._update()
                    version = ",".join(str(run.version) for run in runs)
                    is_known = urllib.parse.parse_qs(url.query).get("version") == [version]
                    content = "" if is_known else json.dumps(describe(runs), allow_nan=False)
                self._answer(204 if is_known else 200, "application/json", content)
            else:
                self._answer(404, "text/plain", "there is no such page\n")

        def _update(self) -> None:
            for run in runs:
                run.update()

        def _answer(self, status: int, kind: str, content: str) -> None:
            body = content.encode()
            with contextlib.suppress(ConnectionError):  # the browser went away
                self.send_response(status)
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Print nothing for each request."""

    try:
        return http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise UsageError(f"port {port} cannot be used ({error.strerror}): give another, --port {port + 1}") from None


def _is_run(folder: Path) -> bool:
    """Tell whether a run has written to a folder: the lock is its first file."""
    return any((folder / name).is_file() for name in (".lock", "settings.json", "metrics.jsonl"))


def _round(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _read_if_there(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file; nothing where it is missing or is being written."""
    with contextlib.suppress(UsageError):
        return (read_json if path.suffix == ".json" else read_yaml)(path, path.name)
    return {}
