"""Which versions of DeepSpeed take the step that they say they take, on a CPU? Each is audited, and computed plainly beside it.

    make bench NAME=deepspeed_versions   half an hour; needs the network; --only 0.18.2 for one version, beside earlier results

`pip install` puts each version into a folder of its own, from its source, without its operators (DS_BUILD_OPS=0), beside the
torch that is here; no compiler is needed. packages/deepspeed_zero.py, a classifier with SGD in float32, is trained by each
under ZeRO 0 to 3, the optimizer offloaded to the CPU or not, with k = 1 and 4 micro-batches in a step of 16 samples, on one and
two processes over gloo. Twice: the audit records it unchanged, and compares it with its own 16 x 1; and without any audit it
saves its weights at the end, which are compared with those that torch alone comes to, by a loop of this file. Where both
disagree, the program is run 19 times more without the audit: two processes may race.

It fails where the audit and the weights disagree.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

sys.path.insert(0, str(harness.ROOT / "tests" / "helpers"))

import torch
import torch.nn.functional as F
from forked import Server

from stepaudit.judge import Comparison, compare
from stepaudit.script import BATCH, WINDOW, Variation

PROGRAM = Path(__file__).parent / "packages" / "deepspeed_zero.py"
VERSIONS = ("0.15.0", "0.15.4", "0.16.9", "0.17.5", "0.17.6", "0.18.2", "0.18.3", "0.18.9", "0.19.0", "0.19.8")
"""The first and the last of 0.15 to 0.19, of the minor versions between them the last, and those around a change of numbers."""
NEEDED = ("hjson", "py-cpuinfo", "psutil", "pydantic", "einops", "msgpack", "ninja", "packaging", "tqdm")
"""Packages that DeepSpeed imports, beside torch and numpy."""
MODES = {
    "0": ["--stage=0"],
    "1": ["--stage=1"],
    "1, offloaded": ["--stage=1", "--offload"],
    "2": ["--stage=2"],
    "2, offloaded": ["--stage=2", "--offload"],
    "3": ["--stage=3"],
    "3, offloaded": ["--stage=3", "--offload"],
}
"""ZeRO's stage, and whether the optimizer is offloaded -> flags of the program."""
IMPORTED = (
    *("stepaudit.program", "torch._dynamo", "torch._inductor.compile_fx", "networkx", "deepspeed.runtime.engine"),
    *("deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.zero.stage3"),
)
"""Imported once, before the programs' processes are forked: what a program imports takes longer than its steps."""
REFERENCE = (16, 1, 1)
LAYOUTS = ((8, 1, 2), (4, 4, 1), (2, 4, 2))
"""b, k, N."""
TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-5  # of the weights at the end, relative to how far they have moved
NUM_AGAIN = 19  # plain runs, where audit and weights disagree: two processes may race
TIMEOUT = 100  # seconds for a run


def install(version: str, folder: Path) -> str:
    """Install a version into a folder; return what pip says where it does not."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target"]
    needed = folder / "needed" / "site-packages"
    commands = [] if needed.exists() else [[*pip, str(needed), *NEEDED]]
    if not (target := find_place(version, folder)).exists():
        commands.append([*pip, str(target), "--no-deps", "--no-build-isolation", f"deepspeed=={version}"])
    paths = [str(needed), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    for command in commands:
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["pip failed"])[-1]
    return ""


def find_place(version: str, folder: Path) -> Path:
    # The audit takes files below site-packages for a library's
    return folder / version / "site-packages"


def train_plainly() -> torch.Tensor:
    """Train the program's classifier by torch alone, in steps of 16 samples; return its weights before and at the end."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(64, 12, generator=generator), torch.randint(5, (64,), generator=generator)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.Tanh(), torch.nn.Linear(32, 5))
    weights = [torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()]
    for x, y in zip(inputs.split(16), targets.split(16), strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    return torch.stack([*weights, torch.nn.utils.parameters_to_vector(model.parameters()).detach()])


def make_variation(layout: tuple[int, int, int]) -> Variation:
    return Variation({BATCH: str(layout[0]), WINDOW: str(layout[1])}, layout[2])


def measure_weights(server: Server, flags: list[str], layout: tuple[int, int, int]) -> float:
    """Train without an audit; return how far the weights are from torch's, in parts of how far those have moved."""
    variation, (first, last) = make_variation(layout), train_plainly()
    with tempfile.TemporaryDirectory() as folder:
        words = [folder, *flags, *variation.argv, f"--weights={folder}/weights"]
        server.run(words, variation.num_processes, TIMEOUT, module=PROGRAM.stem)
        weights = [torch.load(f"{folder}/weights-{rank}") for rank in range(variation.num_processes)]
    return max(float((own - last).norm() / (last - first).norm()) for own in weights)


def describe(comparison: Comparison) -> dict[str, Any]:
    findings = [
        {"cause": f.cause, "where": f.where, "evidence": f.evidence} for f in comparison.findings if not f.is_harmless
    ]
    return {"is_exact": comparison.is_exact, "findings": findings}


def say_last(error: Exception) -> str:
    """Return the line of an error that says most: the last that names a kind of error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line.split(":")[0]]
    return (named or lines)[-1][:200]


def measure(server: Server, version: str, mode: str) -> list[dict[str, Any]]:
    """Audit a version in one mode under each layout, and compute each plainly."""
    rows, flags = [], MODES[mode]
    program = [str(PROGRAM), *flags]
    try:
        reference: Any = server.record(program, make_variation(REFERENCE), 0, TIMEOUT)
    except RuntimeError as error:
        reference = error
    for layout in (REFERENCE, *LAYOUTS):
        row: dict[str, Any] = {"version": version, "zero": mode, "layout": "x".join(map(str, layout))}
        try:
            row["weights_error"] = measure_weights(server, flags, layout)
        except RuntimeError as error:
            row["fails"] = say_last(error)
        if layout != REFERENCE:
            try:
                if isinstance(reference, RuntimeError):
                    raise reference
                recordings = server.record(program, make_variation(layout), 0, TIMEOUT)
                row |= describe(compare(reference, recordings, TOLERANCE))
            except RuntimeError as error:
                row["audit_fails"] = say_last(error)
        if not agrees(row) and "weights_error" in row:  # does the program come to the same each time?
            errors = [row["weights_error"], *(measure_weights(server, flags, layout) for _ in range(NUM_AGAIN))]
            row["num_wrong"] = sum(not error <= WEIGHT_TOLERANCE for error in errors)
        row["agrees"] = agrees(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def varies(row: dict[str, Any]) -> bool:
    """Tell whether the program itself, without an audit, was right in some runs and wrong in others."""
    return 0 < row.get("num_wrong", 0) < NUM_AGAIN + 1


def agrees(row: dict[str, Any]) -> bool:
    """Tell whether the audit's verdict is that of the weights; a program that fails or varies by itself has none."""
    if "fails" in row:
        return "audit_fails" in row or row["layout"] == "x".join(map(str, REFERENCE))
    is_right = row["weights_error"] <= WEIGHT_TOLERANCE
    return varies(row) or ("audit_fails" not in row and row.get("is_exact", True) == is_right)


def show(row: dict[str, Any]) -> str:
    """Say in a few words what came of a row."""
    if "fails" in row:
        return f"fails: {row['fails']}"
    if varies(row):
        return f"varies: {row['num_wrong']} of {NUM_AGAIN + 1} plain runs are wrong"
    if "audit_fails" in row:
        return "AUDIT FAILS"
    if row["is_exact"]:
        return "exact"
    first = row["findings"][0]
    return (
        first["evidence"].removeprefix("weights ").split(", where")[0]
        if "weights" in first["evidence"]
        else first["cause"]
    )


def list_columns(rows: list[dict[str, Any]], version: str, mode: str) -> list[str]:
    """List what each layout of a version and a mode came to."""
    own = {row["layout"]: row for row in rows if (row["version"], row["zero"]) == (version, mode)}
    return [show(own[name]) if name in own else "-" for name in ("x".join(map(str, layout)) for layout in LAYOUTS)]


def group_versions(rows: list[dict[str, Any]]) -> list[tuple[list[str], str, list[str]]]:
    """Group versions that come one behind the other, and to the same: (versions, ZeRO, columns)."""
    groups: list[tuple[list[str], str, list[str]]] = []
    versions = sorted({row["version"] for row in rows}, key=to_numbers)
    for mode in MODES:
        for version in versions:
            columns = list_columns(rows, version, mode)
            if groups and groups[-1][1] == mode and groups[-1][2] == columns:
                groups[-1][0].append(version)
            else:
                groups.append(([version], mode, columns))
    return groups


def to_numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def span(versions: list[str]) -> str:
    return versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"


COLUMNS = ["DeepSpeed", "ZeRO", "k = 1, N = 2", "k = 4, N = 1", "k = 4, N = 2"]


def summarize(results: dict[str, Any]) -> str:
    rows = [row for row in results["rows"] if "is_exact" in row and not varies(row)]
    wrong = [row for row in rows if row["weights_error"] > WEIGHT_TOLERANCE]
    named = [row for row in wrong if "dropped_micro_batches" in {finding["cause"] for finding in row["findings"]}]
    accused = [row for row in rows if row not in wrong and not row["is_exact"]]
    failing, varying = (
        [row for row in results["rows"] if is_so(row)] for is_so in (lambda row: "fails" in row, varies)
    )
    versions = sorted({row["version"] for row in results["rows"]}, key=to_numbers)
    return (
        f"{len(rows)} combinations of {len(versions)} versions were compared. By their weights {len(wrong)} are wrong: "
        f"`dropped_micro_batches` is said of {len(named)}, with the weights. Of the {len(rows) - len(wrong)} others "
        f"{len(accused)} are accused. {len(failing)} rows fail without the audit, too, "
        f"and {len(varying)} come to other weights from run to run, so that nothing is said of them."
    )


def make_table(results: dict[str, Any]) -> str:
    lines = [[span(versions), mode, *columns] for versions, mode, columns in group_versions(results["rows"])]
    return harness.table(COLUMNS, lines)


def markdown(results: dict[str, Any]) -> str:
    rows = results["rows"]
    lines = []
    for row in rows:
        cells = [row["version"], row["zero"], row["layout"]]
        plain = row.get("fails") or f"{row['weights_error']:.2g}"
        verdict = row.get("audit_fails") or (show(row) if "is_exact" in row else "the reference")
        causes = ", ".join(f"`{finding['cause']}`" for finding in row.get("findings", []))
        lines.append([*cells, plain, verdict, causes, "yes" if row["agrees"] else "NO"])
    body = (
        f"On a CPU, with torch {results['about']['versions']['torch']}: nothing is said of GPUs, or of the torch that "
        f"a version was made for. {summarize(results)}\n\n## In short\n\n"
        "What each micro-batch of a window contributes, where the step is not exact.\n\n"
        f"{make_table(results)}\n## All\n\n"
        "Error of the weights at the end: without the audit, beside torch alone, in parts of how far they have moved.\n\n"
        + harness.table("DeepSpeed | ZeRO | b x k x N | error of the weights | audit | named | agree", lines)
    )
    return harness.page("DeepSpeed, version by version, on a CPU", "deepspeed_versions.py", results["about"], body)


def part(results: dict[str, Any]) -> str:
    return harness.part("deepspeed_versions.py", results["about"], f"{make_table(results)}\n{summarize(results)}\n")


def main() -> None:
    parser = harness.flags("deepspeed_versions", __doc__, only=VERSIONS, work=True)
    arguments = parser.parse_args()
    rows = harness.read_other_rows(arguments.output, "rows", "version", arguments.only)
    rows = [row for row in rows if row["version"] in VERSIONS]
    results = {"about": harness.about("make bench NAME=deepspeed_versions", ("torch",)), "rows": rows}
    with harness.open_work_folder(arguments.work) as folder:
        for version in arguments.only:
            if refusal := install(version, folder):
                rows.append({"version": version, "zero": "-", "layout": "-", "fails": refusal, "agrees": True})
            else:
                rows += measure_version(version, folder)
            rows.sort(key=lambda row: to_numbers(row["version"]))
            parts, is_last = {"deepspeed": ("deepspeed.md", part(results))}, version == arguments.only[-1]
            harness.write(arguments.output, results, markdown(results), is_last, parts)
    if wrong := [f"{row['version']}, ZeRO {row['zero']}, {row['layout']}" for row in rows if not row["agrees"]]:
        sys.exit(f"ERROR: audit and weights disagree in {'; '.join(wrong)}")


def measure_version(version: str, folder: Path) -> list[dict[str, Any]]:
    """Measure all modes of a version, by processes that are forked from one that has imported it."""
    paths = [find_place(version, folder), folder / "needed" / "site-packages", PROGRAM.parent]
    saved = dict(os.environ)
    os.environ |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "DS_ACCELERATOR": "cpu"}
    try:
        with Server(libraries=IMPORTED) as server:
            return [row for mode in MODES for row in measure(server, version, mode)]
    finally:
        os.environ.clear()
        os.environ |= saved


if __name__ == "__main__":
    main()
