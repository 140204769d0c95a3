"""Runs the tests as on other kinds of machine: other CPUs' kernels, other numbers of threads, odd settings, a load.

    python .ci/kinds.py [--only KIND,KIND] [TEST ...]

Without tests named: those that launch no processes, and those of the equivalence. A line for each kind; it goes on where a kind
is red, and then ends with 1. What this CPU cannot simulate is left out, and said.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = (["-m", "not distributed"], ["-m", "distributed", "tests/test_equivalence.py"])


@dataclass(frozen=True)
class Kind:
    """A kind of machine.

    Attributes:
        environment: variables that simulate it.
        needs: of the CPU, as /proc/cpuinfo calls it; empty: any CPU will do.
        umask: of all files.
        num_busy: busy programs beside the tests.
    """

    environment: dict[str, str] = field(default_factory=dict)
    needs: str = ""
    umask: int = 0o022
    num_busy: int = 0


# More threads than cores: they wait asleep, as waiting in a loop takes the time of those that compute
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
ODD = {"TZ": "Asia/Kathmandu", "LC_ALL": "C", "COLUMNS": "37", "HOME": "/nonexistent"}
KINDS = {
    "this": Kind(),
    "aten-default": Kind({"ATEN_CPU_CAPABILITY": "default"}),
    "aten-avx2": Kind({"ATEN_CPU_CAPABILITY": "avx2"}, "avx2"),
    "onednn-avx2": Kind({"ONEDNN_MAX_CPU_ISA": "AVX2"}, "avx2"),
    "onednn-avx512": Kind({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, "avx512f"),
    "onednn-amx": Kind({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, "amx_tile"),
    "threads-2": Kind({"TESTS_NUM_THREADS": "2"} | PASSIVE),
    "threads-4": Kind({"TESTS_NUM_THREADS": "4"} | PASSIVE),
    "odd-settings": Kind(ODD, umask=0o077),
    "busy": Kind(num_busy=2),
}


@contextlib.contextmanager
def keep_busy(number: int) -> Iterator[None]:
    """Let so many programs compute within this context."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def run(kind: Kind, tests: list[str]) -> tuple[dict[str, int], list[str]]:
    """Run tests on a kind; return how many there were of each outcome, and what failed."""
    counts, failed = dict.fromkeys(("passed", "failed", "skipped"), 0), []
    for words in [tests] if tests else RUNS:
        with tempfile.TemporaryDirectory(prefix="kinds-") as folder, keep_busy(kind.num_busy):
            report = Path(folder) / "report.xml"
            # Inductor's cache does not ask for ATEN_CPU_CAPABILITY: code of another kind gave losses that are not finite
            variables = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"} | kind.environment
            command = [
                sys.executable,
                "-m",
                "pytest",
                "--numprocesses",
                "auto",
                "--maxprocesses",
                "8",
                "--dist",
                "worksteal",
            ]
            done = subprocess.run(
                [*command, "--junitxml", str(report), *words],
                cwd=ROOT,
                env=os.environ | variables,
                umask=kind.umask,
                capture_output=True,
                text=True,
            )
            if not report.exists():
                counts["failed"] += 1
                failed.append((done.stdout + done.stderr)[-2000:])
                continue
            for case in ET.parse(report).iter("testcase"):
                outcomes = {child.tag for child in case}
                is_red = bool(outcomes & {"failure", "error"})
                counts["failed" if is_red else "skipped" if "skipped" in outcomes else "passed"] += 1
                if is_red:
                    failed.append(f"{case.get('classname')}::{case.get('name')}")
    return counts, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds, separated by commas (all)")
    parser.add_argument("tests", nargs="*", help="as pytest takes them")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := [name for name in names if name not in KINDS]:
        parser.error(f"--only is {','.join(unknown)}: kinds are {', '.join(KINDS)}")
    cpu = Path("/proc/cpuinfo")
    features = set(cpu.read_text().split()) if cpu.exists() else set()
    is_red = False
    for name in names:
        kind = KINDS[name]
        if kind.needs and kind.needs not in features:
            print(f"{name:14} left out: this CPU has no {kind.needs}", flush=True)
            continue
        counts, failed = run(kind, arguments.tests)
        print(f"{name:14} {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}", flush=True)
        for test in failed:
            print(f"  {test}", flush=True)
        is_red |= bool(failed) or not counts["passed"]
    return int(is_red)


if __name__ == "__main__":
    sys.exit(main())
