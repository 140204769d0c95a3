"""Compares many heads at once, in several processes, and reads those that cannot be run."""

import concurrent.futures
import contextlib
import dataclasses
import gc
import io
import os
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers

from samestep.contrib.heads import reading, tiny
from samestep.contrib.heads.comparison import NotMeasuredError, compare
from samestep.contrib.heads.verdicts import EXACT, VERDICTS, agrees

Row = dict[str, Any]
SECONDS = 180
"""Longest that a head may take, a load on the machine included."""
NEEDS = re.compile(r"requires the (\w+) library")
"""Words with which transformers says that a package is missing."""


def ask_head(name: str) -> Row:
    """Compare a head, and read it: `read` is the verdict that was read, `failed` why it could not be run."""
    row: Row = {"head": name, "kind": tiny.find_kind(name), "read": reading.UNKNOWN}
    with _silence():
        try:
            if (made := tiny.find_class(name)) is not None:
                row["read"] = reading.read_head(made).verdict
            with _at_most(SECONDS):
                head = tiny.find_head(name)
                head.build()
                gc.freeze()  # Accelerate collects after each training, and there are many classes by now
                found = dataclasses.asdict(compare(head.build, head.samples))
        except Exception as error:
            return row | {"failed": explain_failure(error)}
    return row | {key: value for key, value in found.items() if value not in ("", None)}


def ask_heads(names: Sequence[str], note: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """Compare heads, on all processors; rows in the order of `names`.

    Args:
        note: is told each row when it is there.
    """
    rows: dict[str, Row] = {}
    with concurrent.futures.ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        for future in concurrent.futures.as_completed([pool.submit(ask_head, name) for name in names]):
            row = future.result()
            rows[row["head"]] = row
            note(row)
    return [rows[name] for name in names]


def explain_failure(error: Exception) -> str:
    """Say in one line why a head was not run."""
    text = " ".join(str(error).split())
    if found := NEEDS.search(text):
        return f"needs the package {found[1]}"
    return text[:160] if isinstance(error, NotMeasuredError | TimeoutError) else f"{type(error).__name__}: {text}"[:160]


def print_table(names: Sequence[str]) -> bool:
    """Compare heads, print a line for each, and the counts; return whether Trainer's step is exact with all that were run."""
    done = 0

    def note(row: Row) -> None:
        nonlocal done
        done += 1
        if done % 10 == 0 or done == len(names):
            print(f"{done} of {len(names)} heads", end="\r" if done < len(names) else "\n", file=sys.stderr, flush=True)

    rows = ask_heads(names, note)
    width = max((len(row["head"]) for row in rows), default=0)
    kind = ""
    for row in rows:
        if row["kind"] != kind:
            kind = row["kind"]
            print(f"{kind}:")
        print(f"  {row['head']:{width}}  {_describe(row)}")
    ran = [row for row in rows if "verdict" in row]
    counts = Counter(row["verdict"] for row in ran)
    print(
        f"{len(rows)} heads, {len(ran)} run: {', '.join(f'{counts[name]} {name}' for name in VERDICTS if counts[name])}"
    )
    agreed = sum(agrees(row["read"], row["verdict"]) for row in ran)
    exact = sum("exact_error" in row for row in ran)
    print(f"read in the source as it was run: {agreed}; exact(Trainer): {exact} exact, {len(ran) - exact} refused")
    return all(row["verdict"] == EXACT for row in ran)


def _describe(row: Row) -> str:
    """Describe a row in a line."""
    if "failed" in row:
        return f"not run ({row['failed']}); read: {row['read']}"
    ours = f"{row['exact_error']:.0e}" if "exact_error" in row else "refused"
    return f"{row['verdict']}, error {row['error']:.0e}; exact(Trainer): {ours}"


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Let libraries say nothing."""
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """Raise TimeoutError where something takes longer."""

    def end(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
