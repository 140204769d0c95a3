"""Serves a page that shows runs while they train: curves, speed, events, digests, by the lines of their metrics.jsonl.

The page polls this program, which reads what a run appended since. Needs no torch and no network; it listens on 127.0.0.1.
templates/watch.html.j2, its style and its script decide how the page looks; this module computes what it shows.
"""

import contextlib
import dataclasses
import http.server
import io
import itertools
import json
import math
import re
import socket
import sys
import threading
import time
import urllib.parse
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from samestep.errors import UsageError, reason
from samestep.pages import find_policy, make_environment
from samestep.printing import format_count
from samestep.recipe.reading import format_name, read_json, read_yaml
from samestep.recipe.run_fields import RECIPE, SETTINGS, find_problems
from samestep.recipe.run_files import LineFile, parse_line

TEMPLATES = Path(__file__).parent / "templates"
MOST_POINTS = 600
"""Points of a curve that a page draws: more than it has pixels on a phone, and fast to draw."""
MOST_EVENTS = 50
"""Events that a page lists, the newest."""
MOST_CURVES = 256
"""Curves of a run that a page draws, of the names that come first."""
MOST_PROBLEMS = 5
"""Lines that a page names of those that it leaves out, the first."""
NO_CURVES = {"step", "epoch", "samples", "tokens", "images", "event", "digest", "skipped", "images_per_second"}
NO_CURVES |= {"slowest_process", "max_expert_load", "unused_experts"}
"""Fields of a line that are not drawn as they are."""


HEADERS = {
    "Cache-Control": "no-store",
    "Connection": "close",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every answer: browsers keep none, show none inside another page, and take none for what it does not say it is."""
OWN_NAMES = re.compile(r"(localhost|127\.0\.0\.1)(:\d{1,5})?", re.ASCII | re.IGNORECASE)
"""Names by which a browser calls the server of the page."""
NOTHING = "default-src 'none'; frame-ancestors 'none'"
"""Policy of an answer that is no page."""
_LINES = {"Content-Type": "text/plain; charset=utf-8", "Content-Length": "16", "Content-Security-Policy": NOTHING}
_BUSY = (
    "HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\n"
    + "".join(f"{name}: {value}\r\n" for name, value in (HEADERS | _LINES).items())
    + "\r\ntry again later\n"
).encode()


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
        # A value that is not finite makes its whole point null. Divided first, as a sum may be larger than a float
        columns = {
            "mean": np.add.reduceat(values / size, starts) * (size / (ends - starts)),
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
        self.inode_and_size: tuple[int | None, int] = (None, 0)
        self.lines = LineFile(self.path)
        self.curves: dict[str, Curve] = {}
        self.events: list[dict[str, Any]] = []
        self.digests: dict[int, str] = {}
        self.last: dict[str, Any] = {}
        self.units_per_step = "samples"
        self.changed_at: float | None = None
        self.problems: list[str] = []
        self.num_problems = 0
        self.num_without_curve = 0
        self.failure: str | None = None

    def update(self) -> None:
        """Read the lines that are new. A last line without an end is left for the next time; one that breaks a rule of
        `run_fields.FIELDS` is left out, and counted."""
        try:
            status = self.path.stat()
            inode, size = self.inode_and_size
            if (inode is not None and status.st_ino != inode) or status.st_size < size:
                self._forget()
                self.version += 1
            self.inode_and_size = status.st_ino, status.st_size
            for number, text in self.lines.read():
                self.changed_at = status.st_mtime
                self.version += 1
                try:
                    self._add(parse_line(text, self.path.name))
                except ValueError as error:
                    self.num_problems += 1
                    self.problems += [f"line {number:,}: {error}"] if self.num_problems <= MOST_PROBLEMS else []
        except FileNotFoundError:
            return
        except OSError as error:
            failure = f"metrics.jsonl, which cannot be read: {error.strerror or error}"
            self.version += failure != self.failure
            self.failure = failure
        else:
            self.failure = None

    def _add(self, line: dict[str, Any]) -> None:
        step = line["step"]
        if "event" in line:
            self.events = [*self.events[1 - MOST_EVENTS :], line]
            return
        for name, value in line.items():
            if name not in NO_CURVES:
                self._add_to_curve(name, step, value)
        if "loss" in line:
            self.last = line
            unit = next((unit for unit in ("tokens", "samples") if unit in line), None)
            if unit and line.get("seconds"):
                self.units_per_step = unit
                self._add_to_curve("speed", step, line[unit] / line["seconds"])
        if "digest" in line:
            self.digests[step] = line["digest"]

    def _add_to_curve(self, name: str, step: int, value: float | None) -> None:
        if name not in self.curves:
            if len(self.curves) >= MOST_CURVES:
                self.num_without_curve += 1
                return
            self.curves[name] = Curve()
        self.curves[name].add(step, value)

    def _read_settings(self) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        """Read recipe.yaml and settings.json as far as they obey their rules, and say what does not."""
        values: list[dict[str, Any]] = []
        problems: list[str] = []
        for name, rules, read in (("recipe.yaml", RECIPE, read_yaml), ("settings.json", SETTINGS, read_json)):
            found: dict[str, Any] = {}
            if (self.folder / name).exists():
                try:
                    found = read(self.folder / name, name)
                except UsageError as error:  # or it is being written
                    problems += error.problems
            wrong = find_problems(found, rules)
            problems += [f"{name}: {problem}" for problem in wrong.values()]
            values.append({field: value for field, value in found.items() if field not in wrong})
        recipe, settings = values
        return recipe, settings, problems

    def _list_problems(self) -> list[str]:
        """List what the page leaves out of metrics.jsonl, and why."""
        problems = [self.failure] if self.failure else []
        if self.num_problems:
            named = [*self.problems, *(["..."] if self.num_problems > len(self.problems) else [])]
            problems.append(f"{format_count(self.num_problems, 'line')} of metrics.jsonl: {'; '.join(named)}")
        if self.lines.is_given_up:
            problems.append(f"metrics.jsonl from line {self.lines.number + 1:,} on, which does not end")
        elif self.lines.rest != b"":
            problems.append(f"line {self.lines.number + 1:,} of metrics.jsonl, which has no end yet")
        if self.num_without_curve:
            count = format_count(self.num_without_curve, "value")
            problems.append(f"{count} of metrics.jsonl: there are more than {MOST_CURVES} names of values")
        return problems

    def describe(self) -> dict[str, Any]:
        """Describe the run as JSON values: its curves, thinned, what stands in its recipe.yaml and settings.json, and what was
        left out of these files because it breaks a rule."""
        recipe, settings, problems = self._read_settings()
        seconds = self.curves["seconds"].values[-200:] if "seconds" in self.curves else []
        step, num_steps = self.last.get("step"), settings.get("num_steps")
        per_step = float(np.median(seconds)) if len(seconds) else None
        left = None
        if per_step and num_steps and step is not None:
            left = per_step * self._count_steps_left(step, num_steps, settings.get("batch_sizes"))
        is_over = step is not None and num_steps is not None and step >= num_steps
        return {
            "name": format_name(self.folder),
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
            "left_out": problems + self._list_problems(),
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
    title = " and ".join(format_name(run.folder.name or run.folder) for run in runs)
    environment = make_environment(TEMPLATES)
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


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of one client of the page's server.

    Attributes:
        seconds: for its request, and again for its answer, however slowly the bytes go.
        connections: at a time; another is told to come again.
        rest_bytes: of what a client sends behind its request, which are read so that it can read the answer.
    """

    seconds: float = 10.0
    connections: int = 32
    rest_bytes: int = 2**24


class _Bytes(io.RawIOBase):
    """Bytes of a connection, to read and to write until a deadline.

    Raises:
        TimeoutError: by reading and writing, after the deadline.
    """

    def __init__(self, connection: socket.socket, deadline: float):
        self.connection, self.deadline = connection, deadline

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._wait()
        return self.connection.recv_into(buffer)

    def write(self, content: Any) -> int:
        self._wait()
        return self.connection.send(content)

    def _wait(self) -> None:
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        self.connection.settimeout(seconds)


class PageServer(http.server.ThreadingHTTPServer):
    """Serves the page of runs, to browsers of this machine."""

    daemon_threads = True  # Ctrl+C waits for none of them
    request_queue_size = 128

    def __init__(self, runs: Sequence[RunReader], port: int, limits: Limits):
        super().__init__(("127.0.0.1", port), _Handler)
        self.runs, self.limits = runs, limits
        self.lock = threading.Lock()
        self.places = threading.BoundedSemaphore(limits.connections)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own if there is a place for it; else say so."""
        if self.places.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with contextlib.suppress(OSError):
            request.settimeout(0)  # this thread waits for nobody; the answer fits into what the system keeps of it
            request.sendall(_BUSY)
            request.recv(2**16)  # else the system would take the answer back
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and give the place back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away or was too slow; another error is one line."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            print(f"WARNING: a request was not answered: {reason(error)}", file=sys.stderr)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request."""

    server: PageServer
    raw_requestline: bytes

    def setup(self) -> None:
        self.connection, limits = self.request, self.server.limits
        self.bytes = _Bytes(self.connection, time.monotonic() + limits.seconds)
        self.rfile, self.wfile = io.BufferedReader(self.bytes), io.BufferedWriter(self.bytes, 2**20)

    def finish(self) -> None:
        """Send what was not sent, and wait for the client to close: what it sends after that would take the answer back."""
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_WR)
        rest = self.server.limits.rest_bytes
        while rest > 0 and (piece := self.rfile.read1(2**16)):
            rest -= len(piece)

    def parse_request(self) -> bool:
        """Parse the first line and the headers; the library would leave an empty line without an answer."""
        if not str(self.raw_requestline, "latin-1").split():
            self.command = self.requestline = self.request_version = ""
            self.send_error(400)
            return False
        return super().parse_request()

    def do_GET(self) -> None:
        """Answer with the page, or with what it asks for."""
        try:
            url = urllib.parse.urlsplit(self.path)
        except ValueError:  # what urllib cannot read is no address of this page
            return self._refuse(400, "this is no address")
        if self.request_version == "HTTP/0.9":
            return self._refuse(400, "ask in HTTP/1.0 or HTTP/1.1")
        if not OWN_NAMES.fullmatch(self.headers.get("Host") or ""):  # another site's name (DNS rebinding)
            return self._refuse(403, "ask for localhost or 127.0.0.1")
        if url.path not in ("/", "/data.json"):
            return self._refuse(404, "there is no such page")
        runs = self.server.runs
        with self.server.lock:
            for run in runs:
                run.update()
            if url.path == "/":
                page = make_page(runs)
                return self._answer(200, "text/html", page, f"{find_policy(page)}; frame-ancestors 'none'")
            version = ",".join(str(run.version) for run in runs)
            is_known = url.query == f"version={version}"
            content = "" if is_known else json.dumps(describe(runs), allow_nan=False)
        return self._answer(204 if is_known else 200, "application/json", content)

    do_HEAD = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that the library refuses, whose message would repeat it."""
        if code == 501:  # a method for which this class has no function
            return self._refuse(405, "ask by GET or HEAD")
        return self._refuse(code, http.HTTPStatus(code).phrase)

    def _refuse(self, status: int, text: str) -> None:
        self._answer(status, "text/plain", f"{text}\n")

    def _answer(self, status: int, kind: str, content: str, policy: str = NOTHING) -> None:
        body = content.encode()
        self.bytes.deadline = time.monotonic() + self.server.limits.seconds
        if self.request_version == "HTTP/0.9":  # its answers would have no head
            self.request_version = "HTTP/1.0"
        self.close_connection = True
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        if status != 204:  # which has none
            self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", policy)
        if status == 405:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD" and status != 204:
            self.wfile.write(body)

    def version_string(self) -> str:
        """Name the server, without versions."""
        return "samestep"

    def log_message(self, *_: Any) -> None:
        """Print nothing for each request."""


def make_server(runs: Sequence[RunReader], port: int, limits: Limits = Limits()) -> PageServer:
    """Make the server of the page, on 127.0.0.1; `serve_forever` runs it.

    Args:
        runs: what it shows.
        port: 0 takes any that is free.
        limits: of each client.

    Raises:
        UsageError: the port is not free.
    """
    try:
        return PageServer(runs, port, limits)
    except OSError as error:
        raise UsageError(f"port {port} cannot be used ({error.strerror}): give another, --port {port + 1}") from None


def _is_run(folder: Path) -> bool:
    """Tell whether a run has written to a folder: the lock is its first file."""
    return any((folder / name).is_file() for name in (".lock", "settings.json", "metrics.jsonl"))


def _round(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
