"""No test measures time: what takes long in a test is a number, and a wait is for a condition (tests/helpers/waiting.py)."""

import ast
import re
from pathlib import Path

import pytest
from common import ROOT

CLOCKS = {
    *("sleep", "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time"),
    *("process_time_ns", "thread_time", "thread_time_ns", "clock_gettime", "getloadavg", "default_timer", "Timer"),
}
"""What reads a clock, or waits for one, by the modules `time`, `os`, `timeit`, `threading` and `asyncio`."""
MODULES = {"time", "os", "timeit", "threading", "asyncio"}
IN_TEXT = re.compile(r"\b(?:time|os|timeit|asyncio)\.(?:" + "|".join(sorted(CLOCKS)) + r")\(|(?:^|[\s;&|])sleep \d")
"""The same in programs and commands that tests keep in strings."""
EXCEPTIONS = {
    "helpers/run_loading.py: perf_counter": "seconds for a benchmark, which no test compares",
    "helpers/run_loading.py: sleep": "between two looks at a process's memory",
    "helpers/waiting.py: monotonic": "the deadline that ends a hang",
    "helpers/waiting.py: sleep": "between two looks at a condition, however often",
}
"""FILE: NAME -> why it decides no test."""
TESTS = ROOT / "tests"
FILES = sorted(path for path in TESTS.rglob("*.py") if path != Path(__file__))


def find_clocks(text: str) -> set[str]:
    """Find the names of clocks that a program uses: by a module or imported from it, in its code or in its strings."""
    tree = ast.parse(text)
    modules = set(MODULES)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname for alias in node.names if alias.asname and alias.name in MODULES}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            found |= {alias.name for alias in node.names if alias.name in CLOCKS}
        elif isinstance(node, ast.Attribute) and node.attr in CLOCKS:
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            found |= {node.attr} if owner in modules else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {match.strip().rstrip("(").rpartition(".")[2].split()[0] for match in IN_TEXT.findall(node.value)}
    return found


def test_no_test_reads_a_clock_or_sleeps():
    """An exception that is needed no longer is none."""
    used = {f"{path.relative_to(TESTS)}: {name}" for path in FILES for name in find_clocks(path.read_text())}
    assert used == EXCEPTIONS.keys(), "wait for a condition (waiting.until), or replace the clock by a number"


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("import time\ntime.sleep(1)", {"sleep"}),
        ("import time as t\nbegin = t.perf_counter()", {"perf_counter"}),
        ("from time import monotonic as now", {"monotonic"}),
        ("from samestep import interrupt\ninterrupt.time.monotonic()", {"monotonic"}),
        ("import os\nos.getloadavg()", {"getloadavg"}),
        ('PROGRAM = """\nimport time\ntime.sleep(20)\n"""', {"sleep"}),
        ('run("sleep 5; echo done")', {"sleep"}),
        ("monkeypatch.setattr(kernels, 'time', Clock())\nkernels.time.now += 1", set()),
        ("clock.monotonic = lambda: next(moments)", set()),
        ('"""It may sleep, from time to time."""', set()),
    ],
)
def test_a_clock_is_found(program, found):
    assert find_clocks(program) == found
