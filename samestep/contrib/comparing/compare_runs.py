"""Compares two trainings by what they left in their output folders: where they part, in which tensors, by how much.

Three things are compared, to the bit: the lines of metrics.jsonl, the digests of tensors (--digest_steps), and the tensors of
checkpoints of the same step. Needs no torch.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from samestep.contrib.comparing import verdict
from samestep.errors import UsageError, reason
from samestep.printing import format_count
from samestep.recipe.reading import format_name, format_value, read_json
from samestep.recipe.run_fields import TIMES
from samestep.recipe.run_files import read_lines, read_plain

KINDS = ("gradients", "parameters", "moments")
"""Kinds of digests, in the order in which a step computes the tensors."""
PARTS = {"model": "parameters", "optimizer": "moments"}
"""Part of a checkpoint -> kind of its tensors; the model's are parameters and buffers."""
CHUNK = 1 << 22
"""Elements of a tensor that are compared at a time, to bound the memory."""
NUM_SHOWN = 5
"""Names, or rows of a table, in a text."""


def compare(folders: Sequence[str]) -> dict[str, Any]:
    """Compare two output folders, A and B.

    Returns:
        JSON values. Where two values stand for one, they are A's and B's.

        - `runs`: the folders.
        - `verdict`: "same bits", "equal to rounding", "different", or "other steps": nothing differs of the steps of both.
        - `last`: null, or the last held-out loss of each, `eval_loss`, and the samples of the steps before it, `samples`.
        - `largest`: null, or where losses and evaluations differ the most, relatively: `step`, `name`, `relative`.
        - `is_identical`: whether both have the same steps, and nothing that was compared differs.
        - `settings`: {"recipe", "run", "versions" or "data": {name: [value, value]}}, those that differ.
        - `events`: [lines, lines] of metrics.jsonl that are events; they may differ between identical runs.
        - `num_steps`, `num_evaluations`: of both, the same, before the parting. `num_digests`, `num_checkpoints`: of both, the
          same, before the first that differ.
        - `lone_steps`: [[first, last], [first, last]] of the steps that the other lacks; null for none.
        - `parting`: null, or what is known of the first `step` at which anything differs. `metrics`: {name: {"values",
          "relative": |a - b| / |a|}} of those that differ at this step, loss and grad_norm in any case. `digests`: null, or the
          first digests that differ: `step`, `step_before` (the last digests that are the same; null: none), and
          {"gradients", "parameters" and "moments": {"names": those that differ, "total": number of all}}.
        - `checkpoint`: null, or the first checkpoint of both that differs: `step`, `total` (tensors) and `tensors`, those that
          differ, with `kind`, `name`, `num_elements`, `num_different`, `largest` (|a - b|), `norm` (||a||) and `relative`
          (||a - b|| / ||a||, L2 norms; null: it is no number).

    Raises:
        UsageError: a folder that holds no run, or a file that a run does not write so.
    """
    a, b = map(Path, folders)
    for folder in (a, b):
        if not (folder / "metrics.jsonl").is_file():
            raise UsageError(
                f"{format_name(folder)} is no run, for it has no metrics.jsonl: give the output_dir of a training"
            )
    lines_a, lines_b = map(_read_metrics, (a, b))
    common = sorted(lines_a.keys() & lines_b.keys())
    differences = {key: names for key in common if (names := _find_differences(lines_a[key], lines_b[key]))}
    num_digests, digests = _compare_digests(a, b)
    num_checkpoints, checkpoint = _compare_checkpoints(a, b)
    first = min(
        [step for step, _ in differences] + [item["step"] for item in (digests, checkpoint) if item], default=None
    )
    kinds = [kind for step, kind in common if first is None or step < first]
    steps = [{step for step, kind in lines if kind == "step"} for lines in (lines_a, lines_b)]
    lone_steps = [steps[0] - steps[1], steps[1] - steps[0]]
    parting = None
    if first is not None:
        differing = {key: differences.get(key, []) for key in common if key[0] == first}
        pairs = {
            name: [lines_a[key].get(name), lines_b[key].get(name)]
            for key, names in differing.items()
            for name in dict.fromkeys([*(("loss", "grad_norm") if key[1] == "step" else ()), *names])
        }
        metrics = {name: {"values": pair, "relative": _relative(*pair)} for name, pair in pairs.items()}
        parting = {"step": first, "metrics": metrics, "digests": digests}
    result = {
        "runs": list(folders),
        "is_identical": first is None and steps[0] == steps[1] != set(),
        "settings": _compare_settings(a, b),
        "events": [[line for line in read_lines(folder / "metrics.jsonl") if "event" in line] for folder in (a, b)],
        "num_steps": kinds.count("step"),
        "num_evaluations": kinds.count("evaluation"),
        "num_digests": num_digests,
        "num_checkpoints": num_checkpoints,
        "lone_steps": [[min(rest), max(rest)] if rest else None for rest in lone_steps],
        "parting": parting,
        "checkpoint": checkpoint,
        "largest": verdict.find_largest(lines_a, lines_b),
        "last": _find_last(lines_a, lines_b),
    }
    return result | {"verdict": verdict.judge(result)}


# ---------------------------------------------------------------------------------------------------------------------
# Lines


def _read_metrics(folder: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """Read (step, `step` or `evaluation`) -> line of metrics.jsonl."""
    kinds = {"loss": "step", "eval_loss": "evaluation"}
    lines = read_lines(folder / "metrics.jsonl")
    return {(line["step"], kinds[name]): line for line in lines for name in kinds if name in line}


def _find_last(*runs: dict[tuple[int, str], dict[str, Any]]) -> dict[str, list[Any]] | None:
    """Find the last held-out loss of each run, and the samples that it had trained on; None: one of them has none."""
    found = []
    for lines in runs:
        evaluations = [step for step, kind in lines if kind == "evaluation"]
        if not evaluations:
            return None
        last = max(evaluations)
        samples = sum(line.get("samples", 0) for (step, kind), line in lines.items() if kind == "step" and step <= last)
        found.append((lines[last, "evaluation"]["eval_loss"], samples))
    losses, counts = zip(*found, strict=True)
    return {"eval_loss": list(losses), "samples": list(counts)}


def _find_differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Find the metrics in which two lines differ; a digest that only one has is no difference."""
    ignored = {"seconds", *TIMES} | ({"digest"} if "digest" not in a.keys() & b.keys() else set())
    return [name for name in a | b if name not in ignored and a.get(name) != b.get(name)]


def _relative(a: Any, b: Any) -> float | None:
    """Compute |a - b| / |a|; None where it is no number."""
    if not all(isinstance(value, int | float) for value in (a, b)):
        return None
    return 0.0 if a == b else _finite(abs(a - b) / abs(a)) if a else None


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _compare_digests(a: Path, b: Path) -> tuple[int, dict[str, Any] | None]:
    """Count the digests of both that are the same before the first that differ, and describe those (see `compare`)."""
    files = [read_lines(folder / "digests.jsonl") for folder in (a, b)]
    count, step_before, lines = 0, None, [next(file, None) for file in files]
    while all(line is not None for line in lines):
        steps = [line["step"] for line in lines]
        if steps[0] == steps[1]:
            ours, theirs = ([line[kind] for kind in KINDS] for line in lines)
            if ours != theirs:
                described = {
                    kind: {"names": [name for name in x | y if x.get(name) != y.get(name)], "total": len(x | y)}
                    for kind, x, y in zip(KINDS, ours, theirs, strict=True)
                }
                return count, {"step": steps[0], "step_before": step_before} | described
            count, step_before = count + 1, steps[0]
        for index, file in enumerate(files):
            if steps[index] == min(steps):
                lines[index] = next(file, None)
    return count, None


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


def _find_checkpoints(folder: Path) -> dict[int, Path]:
    """Find step -> checkpoint, the oldest first."""
    paths = {path: re.fullmatch(r"checkpoint-(0|[1-9][0-9]*)", path.name) for path in folder.iterdir()}
    steps = {int(match[1]): path for path, match in paths.items() if match and (path / "manifest.json").is_file()}
    return dict(sorted(steps.items()))


def _compare_settings(a: Path, b: Path) -> dict[str, dict[str, list[Any]]]:
    """Find the fields in which the recipes differ, how the last sessions were run, and versions of the newest checkpoints."""
    records = [_read_settings(folder) for folder in (a, b)]
    result = {}
    for part in records[0].keys() & records[1].keys():
        ours, theirs = (record[part] for record in records)
        pairs = {name: [ours.get(name), theirs.get(name)] for name in ours | theirs if name != "output_dir"}
        result[part] = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return {part: result[part] for part in ("recipe", "data", "run", "versions") if result.get(part)}


def _read_settings(folder: Path) -> dict[str, dict[str, Any]]:
    settings = {}
    if (folder / "recipe.yaml").is_file():
        settings["recipe"] = read_plain(folder / "recipe.yaml")
    if (folder / "settings.json").is_file():
        settings["run"] = read_plain(folder / "settings.json")
    if paths := list(_find_checkpoints(folder).values()):
        state = read_plain(paths[-1] / "state.json")
        keys = {"data": "data_fingerprints", "versions": "versions"}
        settings |= {part: state[key] for part, key in keys.items() if isinstance(state.get(key), dict)}
    return settings


def _compare_checkpoints(a: Path, b: Path) -> tuple[int, dict[str, Any] | None]:
    """Count the checkpoints of both that are the same before the first that differs, and describe that (see `compare`)."""
    ours, theirs = map(_find_checkpoints, (a, b))
    for count, step in enumerate(steps := sorted(ours.keys() & theirs.keys())):
        total, tensors = _compare_tensors(ours[step], theirs[step])
        if tensors:
            return count, {"step": step, "total": total, "tensors": tensors}
    return len(steps), None


def _compare_tensors(a: Path, b: Path) -> tuple[int, list[dict[str, Any]]]:
    """Compare the tensors of two checkpoints; return their number, and those that differ (see `compare`)."""
    hashes_a, hashes_b = map(_read_hashes, (a, b))
    if hashes_a == hashes_b:
        return 0, []
    files_a, files_b = _list_tensors(a, hashes_a), _list_tensors(b, hashes_b)
    tensors = []
    for kind, name in dict.fromkeys([*files_a, *files_b]):
        x, y = _read_tensor(files_a.get((kind, name), [])), _read_tensor(files_b.get((kind, name), []))
        if difference := _compare_arrays(x, y):
            tensors.append({"kind": kind, "name": name} | difference)
    return len(files_a | files_b), tensors


def _read_hashes(folder: Path) -> dict[str, str]:
    """Read the name of each file of tensors -> its hash."""
    file = folder / "manifest.json"
    files = read_json(file, format_name(file)).get("files")
    is_whole = isinstance(files, dict) and all(isinstance(entry, dict) for entry in files.values())
    if not is_whole or any(Path(name).name != name or "\0" in name for name in files):
        raise UsageError(f"{format_name(file)} lists no files: it is damaged")
    return {name: entry.get("sha256") for name, entry in sorted(files.items()) if name.endswith(".safetensors")}


def _list_tensors(folder: Path, files: Iterable[str]) -> dict[tuple[str, str], list[tuple[Path, str]]]:
    """Find where each tensor is: (kind, name) -> files, and its name in them; sharded tensors are in several, in order.

    Moments are named as parameters are, without what all names of the file begin with.
    """
    places: dict[str, dict[str, list[tuple[Path, str]]]] = {kind: {} for kind in PARTS.values()}
    for file in files:
        kind = PARTS.get(re.split(r"[-.]", file)[0])
        with _reading(folder / file), safe_open(folder / file, "np") as tensors:
            for name in tensors.keys() if kind else ():
                places[kind].setdefault(name, []).append((folder / file, name))
    first_parts = {name.partition(".")[0] for name in places["moments"]}
    names = {name.rpartition("/")[0] for name in places["moments"]}
    prefix = f"{first_parts.pop()}." if len(first_parts) == 1 and not names <= places["parameters"].keys() else ""
    return {
        (kind, name.removeprefix(prefix) if kind == "moments" else name): where
        for kind, group in places.items()
        for name, where in group.items()
    }


def _read_tensor(places: Sequence[tuple[Path, str]]) -> np.ndarray | None:
    """Read a whole tensor; None: it is nowhere."""
    rows = []
    for path, name in places:
        with _reading(path), safe_open(path, "np") as file:
            rows.append(file.get_tensor(name))
    return rows[0] if len(rows) == 1 else np.concatenate(rows) if rows else None


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, TypeError) as error:  # TypeError: a type of numbers that numpy lacks
        raise UsageError(f"{format_name(path)} cannot be read: {reason(error)}") from None


def _compare_arrays(a: np.ndarray | None, b: np.ndarray | None) -> dict[str, Any] | None:
    """Compare two tensors to the bit; None: they are the same."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        sizes = [array.size for array in (a, b) if array is not None]
        return {
            "num_elements": max(sizes),
            "num_different": max(sizes),
            "largest": None,
            "norm": None,
            "relative": None,
        }
    a, b = (array.reshape(-1) for array in (a, b))
    num_different, largest, square, whole_square = 0, 0.0, 0.0, 0.0
    for start in range(0, a.size, CHUNK):
        x, y = (array[start : start + CHUNK] for array in (a, b))
        bits = f"u{a.itemsize}"  # in which 0 and -0 differ, and a number that is none does not differ from itself
        num_different += int(np.count_nonzero(x.view(bits) != y.view(bits)))
        x, y = x.astype(np.float64), y.astype(np.float64)
        with np.errstate(all="ignore"):
            distance = np.abs(x - y)
            largest = float(np.maximum(largest, distance.max()))
            square += float(distance @ distance)
            whole_square += float(x @ x)
    if num_different == 0:
        return None
    relative = math.sqrt(square / whole_square) if whole_square else math.inf
    return {
        "num_elements": a.size,
        "num_different": num_different,
        "largest": _finite(largest),
        "norm": _finite(math.sqrt(whole_square)),
        "relative": _finite(relative),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Text


def write(result: dict[str, Any]) -> Iterator[str]:
    """Write what `compare` found as lines of text."""
    a, b = (format_name(folder) for folder in result["runs"])
    yield f"A: {a}\nB: {b}"
    if settings := result["settings"]:
        yield "settings that differ, of A and of B:"
        rows = [(part, name, pair) for part, pairs in settings.items() for name, pair in pairs.items()]
        yield from (f"  {part:9} {name}: {' | '.join(map(_write_value, pair))}" for part, name, pair in rows)
    else:
        yield "settings: none differs of those that both recorded"
    for name, events in zip("AB", result["events"], strict=True):
        yield from (
            f"event in {name}, step {line['step']}: {format_value(line['event'], 300)[1:-1]}" for line in events
        )
    for (name, other), lone in zip((("A", "B"), ("B", "A")), result["lone_steps"], strict=True):
        if lone:
            yield f"steps {lone[0]} to {lone[1]}: {name} has some that {other} lacks"
    counts = ", ".join(
        format_count(result[f"num_{name}s"], name) for name in ("step", "evaluation", "digest", "checkpoint")
    )
    if result["is_identical"]:
        yield f"identical: {counts}"
    elif result["parting"] is None:
        yield f"not the same steps, but nothing differs of what both have: {counts}"
    else:
        yield from verdict.write(result)
        if (last := result["last"]) and {
            "recipe",
            "data",
        } & settings.keys():  # two trainings, of which one may be better
            values = [f"{loss:.5g} after {count:,} samples" for loss, count in zip(*last.values(), strict=True)]
            yield f"held-out loss at the end: {' | '.join(values)}"
        yield from _write_parting(result["parting"])
        yield from _write_checkpoint(result)


def _write_value(value: Any) -> str:
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)


def _write_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _write_parting(parting: dict[str, Any]) -> Iterator[str]:
    step, digests = parting["step"], parting["digests"]
    yield f"they part at step {step:,}"
    for name, item in parting["metrics"].items():
        ours, theirs = map(_write_value, item["values"])
        if ours == theirs:
            yield f"  {name}: {ours}, the same"
        elif name != "digest":
            yield f"  {name}: {ours} | {theirs}, relative difference {_write_number(item['relative'])}"
    if digests is None:
        yield "  tensors: no digests of both differ; train both with --digest_steps 1 to have the tensors named"
        return
    before, at = digests["step_before"], digests["step"]
    if at == (before or 0) + 1:
        kind = next(kind for kind in KINDS if digests[kind]["names"])
        yield f"  {kind} that differ{'' if at == step else f', first at step {at:,}'}: {_write_names(**digests[kind])}"
        return
    since = "" if before is None else f"the same after step {before:,}, "
    yield f"  tensors: {since}not after step {at:,}; train both with --digest_steps 1 to have the first named"
    for kind in KINDS:
        yield f"  {kind} that differ after step {at:,}: {_write_names(**digests[kind])}"


def _write_names(names: Sequence[str], total: int) -> str:
    shown = ", ".join(names[:NUM_SHOWN]) + (", ..." if len(names) > NUM_SHOWN else "")
    return f"{len(names):,} of {total:,}" + (f": {shown}" if names else "")


def _write_checkpoint(result: dict[str, Any]) -> Iterator[str]:
    checkpoint = result["checkpoint"]
    if checkpoint is None:
        count = format_count(result["num_checkpoints"], "checkpoint")
        yield f"by how much: unknown ({count} of both, none differs); train both with --checkpointing_steps"
        return
    tensors = checkpoint["tensors"]
    yield f"by how much, at checkpoint-{checkpoint['step']}: {len(tensors):,} of {checkpoint['total']:,} tensors differ"
    orders = {"relative": ("||a - b|| / ||a||", NUM_SHOWN), "largest": ("|a - b|", 1)}
    for key, (formula, number) in orders.items():
        yield f"  most by {formula}:"
        for tensor in sorted(tensors, key=lambda t: -math.inf if t[key] is None else -t[key])[:number]:
            elements = f"{tensor['num_different']:,} of {tensor['num_elements']:,} elements"
            yield f"    {_write_number(tensor[key])}  {tensor['kind']} {tensor['name']}, {elements}"
