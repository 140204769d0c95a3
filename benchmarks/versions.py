"""Which releases of transformers and TRL does the package work with? The tests of the exact step against each, as installed.

    make bench NAME=versions         an hour; needs the network; --pairs 5.17.0+1.12.0 for one pair, beside earlier results

Releases are those that the index has, from the bounds in pyproject.toml to the newest: of each minor version the last. Each
transformers is tried with the newest TRL, each TRL with the newest transformers, and the oldest of both together. The oldest
and the newest pair run all tests that are named here, those between test_exact.py. For a pair `pip install` installs a copy of
this checkout and the two, by pip's own resolver, into a fresh environment in a temporary folder, which sees the packages of
this one behind its own (torch is not tried in other versions). The tests run beside a copy without the packages' sources, so
that what is tested is what was installed. It fails where one of them does.
"""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import harness

SOURCES = ("samestep", "stepaudit", "stepplan")
TESTS = [f"tests/test_{name}.py" for name in ("exact", "exact_trainer", "exact_steps", "check_model")]
TRAININGS = "it_learns the_saved_model_answers_in_its_chat_template every_cut_in_time_is_the_same_step[llama]".split()
TESTS += [f"tests/test_finetune_causal_lm.py::test_{name}" for name in TRAININGS]
OF_SOURCES = ["tests/test_packaging.py"]
"""Tests that read the sources of the packages, which are in the first of two copies of the checkout."""
LEFT_OUT = {"1.15.0": "its SFT, DPO and KTO need Triton, plain or exact, which torch for CPUs does not have"}
"""Releases of TRL that do not train on this machine by themselves, and why."""
MARKS = "not distributed and not thorough"
IN_PARALLEL = "--numprocesses auto --maxprocesses 8 --dist worksteal".split()
QUESTION = """
import json, samestep
from importlib.metadata import version
print(json.dumps([samestep.__file__, {{name: version(name) for name in {names}}}]))
"""
SHOWN = ("tokenizers", "huggingface_hub", "datasets", "accelerate")


def to_numbers(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in release.split("."))


def choose_releases(releases: list[str], oldest: str) -> list[str]:
    """Choose the last release of each minor version, from the oldest that is taken to the newest.

    >>> choose_releases(["2.0.0", "1.10.1", "1.10.0", "1.9.0", "1.8.2", "2.1.0rc1"], "1.9")
    ['1.9.0', '1.10.1', '2.0.0']
    """
    numbers = sorted(to_numbers(release) for release in releases if re.fullmatch(r"\d+\.\d+\.\d+", release))
    last = {number[:2]: number for number in numbers if number >= to_numbers(oldest)}
    return [".".join(map(str, number)) for number in last.values()]


def choose_pairs(first: list[str], second: list[str]) -> dict[str, list[str]]:
    """Pair each release with the newest of the other package, and the oldest of both; say which tests each pair runs.

    >>> [(pair, len(tests)) for pair, tests in choose_pairs(["1.0", "1.1", "1.2"], ["7.0", "7.1"]).items()]
    [('1.0+7.0', 8), ('1.2+7.1', 8), ('1.0+7.1', 1), ('1.1+7.1', 1), ('1.2+7.0', 1)]
    """
    ends = [(first[0], second[0]), (first[-1], second[-1])]
    pairs = [*ends, *((a, second[-1]) for a in first), *((first[-1], b) for b in second)]
    return {f"{a}+{b}": [*TESTS, *OF_SOURCES] if (a, b) in ends else TESTS[:1] for a, b in dict.fromkeys(pairs)}


def list_pairs() -> dict[str, list[str]]:
    """List the pairs to try, of the releases that the index has today, with the tests of each."""
    project = tomllib.loads((harness.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["trl"]]
    oldest = dict(line.split(">=") for line in lines if ">=" in line)
    chosen = []
    for package in ("transformers", "trl"):
        words = [sys.executable, "-m", "pip", "index", "versions", package, "--disable-pip-version-check"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        releases = re.search("Available versions: (.*)", done.stdout)[1].split(", ")
        chosen.append(choose_releases(releases, oldest[package]))
    transformers, trl = chosen
    return choose_pairs(transformers, [release for release in trl if release not in LEFT_OUT])


def copy_checkout(folder: Path) -> tuple[Path, Path]:
    """Copy this checkout twice, the second time without the packages' sources."""
    whole, bare = folder / "checkout", folder / "without"
    ignored = ".git .venv* runs build dist site *.egg-info __pycache__ .*_cache .hypothesis".split()
    shutil.copytree(harness.ROOT, whole, ignore=shutil.ignore_patterns(*ignored))
    shutil.copytree(whole, bare, ignore=lambda path, _: SOURCES if Path(path) == whole else ())
    return whole, bare


def install(folder: Path, checkout: Path, pair: str) -> tuple[Path, str]:
    """Make an environment, and install a pair beside the checkout; return its Python, and what pip says where it refuses."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python, packages = folder / "bin" / "python", "lib/python{}.{}/site-packages".format(*sys.version_info)
    (folder / packages / "behind.pth").write_text(sysconfig.get_path("purelib"))
    transformers, trl = pair.split("+")
    words = [checkout, f"transformers=={transformers}", f"trl=={trl}", f"torch=={version('torch')}"]
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run([*map(str, pip)], cwd=folder, capture_output=True, text=True)
    return python, (done.stderr.strip().splitlines()[-1] if done.returncode else "")


def run_tests(python: Path, checkout: Path, tests: list[str]) -> tuple[int, int, list[str]]:
    """Run tests that launch no processes, in a copy of the checkout; count what passed and was skipped, name what failed."""
    report = checkout / "report.xml"
    words = [str(python), "-P", "-m", "pytest", "-m", MARKS, f"--junitxml={report}", *IN_PARALLEL, *tests]
    done = subprocess.run(words, cwd=checkout, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        sys.exit(f"{' '.join(words)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in cases if {"failure", "error"} & _kinds(case)]
    num_skipped = sum("skipped" in _kinds(case) for case in cases)
    if failed:
        print(done.stdout[-6000:], file=sys.stderr)
    return len(cases) - num_skipped - len(failed), num_skipped, failed


def _kinds(case: ElementTree.Element) -> set[str]:
    return {child.tag for child in case}


def measure(pair: str, tests: list[str], folder: Path, whole: Path, bare: Path) -> dict[str, Any]:
    """Install a pair, and run tests."""
    transformers, trl = pair.split("+")
    row: dict[str, Any] = {"pair": pair, "transformers": transformers, "trl": trl, "date": time.strftime("%Y-%m-%d")}
    python, refusal = install(folder / pair, whole, pair)
    if refusal:
        return row | {"refused": refusal}
    question = QUESTION.format(names=("transformers", "trl", *SHOWN))
    place, found = json.loads(subprocess.check_output([python, "-P", "-c", question], cwd=bare, text=True))
    is_ours = Path(place).is_relative_to(folder / pair) and f"{found.pop('transformers')}+{found.pop('trl')}" == pair
    if not is_ours:
        sys.exit(f"{pair}: the environment has another package: {place}, {found}")
    places = [(bare, [name for name in tests if name not in OF_SOURCES])]
    places += [(whole, OF_SOURCES)] if set(OF_SOURCES) <= set(tests) else []
    counts = [run_tests(python, place, names) for place, names in places]
    passed, skipped, failed = (sum(parts, start=type(parts[0])()) for parts in zip(*counts, strict=True))
    shutil.rmtree(folder / pair)
    return row | {"beside": found, "passed": passed, "skipped": skipped, "failed": failed}


def show(row: dict[str, Any]) -> str:
    if "refused" in row:
        return f"pip refuses: {row['refused']}"
    skipped = f", {row['skipped']} skipped" if row["skipped"] else ""
    names = ", ".join(f"`{name}`" for name in row["failed"])
    return f"{row['passed']} passed{skipped}" + (f", {len(row['failed'])} failed: {names}" if names else "")


def list_beside(row: dict[str, Any], names: Sequence[str]) -> list[str]:
    return [row.get("beside", {}).get(name, "-") for name in names]


def part(results: dict[str, Any]) -> str:
    """Say in a table which releases work: the generated part of docs/install.md."""
    rows = [
        [row["transformers"], row["trl"], *list_beside(row, ["huggingface_hub"]), show(row), row["date"]]
        for row in results["rows"]
    ]
    columns = "transformers | TRL | huggingface_hub | tests of the exact step | tried"
    return harness.part("versions.py", results["about"], harness.table(columns, rows) + f"\n{say_left_out()}")


def say_left_out() -> str:
    return "".join(f"Not tried: TRL {release}: {reason}.\n" for release, reason in LEFT_OUT.items())


def markdown(results: dict[str, Any]) -> str:
    rows = [
        [row["transformers"], row["trl"], *list_beside(row, SHOWN), show(row), row["date"]] for row in results["rows"]
    ]
    table = harness.table(["transformers", "TRL", *SHOWN, "tests", "tried"], rows)
    tests = ", ".join(f"`{name.removeprefix('tests/')}`" for name in [*TESTS, *OF_SOURCES])
    body = f"{table}\n{say_left_out()}\nTests that launch no processes: of {tests}; between oldest and newest, of the first.\n"
    return harness.page("Releases of transformers and TRL", "versions.py", results["about"], body)


def main() -> None:
    parser = harness.flags("versions", __doc__, work=True)
    parser.add_argument("--pairs", nargs="+", metavar="TRANSFORMERS+TRL", help="only these, as 5.17.0+1.12.0")
    arguments = parser.parse_args()
    tests = list_pairs()
    pairs = arguments.pairs or list(tests)
    rows = harness.read_other_rows(arguments.output, "rows", "pair", pairs) if arguments.pairs else []
    results = {"about": harness.about("make bench NAME=versions", ("torch", "pytest")), "rows": rows}
    with harness.open_work_folder(arguments.work) as folder:
        whole, bare = copy_checkout(folder)
        for pair in pairs:
            rows.append(measure(pair, tests.get(pair, TESTS[:1]), folder, whole, bare))
            print(f"{pair}: {show(rows[-1])}", file=sys.stderr, flush=True)
            rows.sort(key=lambda row: (to_numbers(row["transformers"]), to_numbers(row["trl"])))
            parts = {"versions": ("install.md", part(results))}
            harness.write(arguments.output, results, markdown(results), pair == pairs[-1], parts)
    if failing := [row["pair"] for row in rows if row["pair"] in pairs and (row.get("refused") or row["failed"])]:
        sys.exit(f"ERROR: not all is well with {', '.join(failing)}")


if __name__ == "__main__":
    main()
