"""Judges how two runs differ: not at all, by rounding, or by more."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

SAME, ROUNDING, DIFFERENT, OTHER_STEPS = "same bits", "equal to rounding", "different", "other steps"
TOLERANCE = 1e-5
"""Largest relative difference of losses and evaluations that is called rounding: what the audit allows float32."""
TENSOR_TOLERANCE = 1e-3
"""Largest ||a - b|| / ||a|| of all parameters together that is: an optimizer's steps do not shrink with the gradient."""

Lines = Mapping[tuple[int, str], Mapping[str, Any]]


def find_largest(a: Lines, b: Lines) -> dict[str, Any] | None:
    """Find the largest relative difference of losses and evaluations: |a - b| / |a|.

    Args:
        a, b: (step, `step` or `evaluation`) -> line of metrics.jsonl.

    Returns:
        `step`, `name` and `relative` (null: one of both is no number) of the first line with the largest; None: none differs.
    """
    largest: dict[str, Any] | None = None
    for key in sorted(a.keys() & b.keys()):
        ours, theirs = a[key], b[key]
        names = ["loss"] if key[1] == "step" else [name for name in ours if name.startswith("eval_")]
        for name in names:
            if ours.get(name) != theirs.get(name):
                relative = _divide(ours.get(name), theirs.get(name))
                if largest is None or relative > _read(largest["relative"]):
                    largest = {"step": key[0], "name": name, "relative": relative if math.isfinite(relative) else None}
    return largest


def _divide(a: Any, b: Any) -> float:
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in (a, b)) or not a:
        return math.inf
    relative = abs(a - b) / abs(a)
    return relative if math.isfinite(relative) else math.inf


def _read(relative: float | None) -> float:
    return math.inf if relative is None else relative


def find_distance(checkpoint: Mapping[str, Any] | None) -> float:
    """Compute ||a - b|| / ||a|| of all parameters together that differ in a checkpoint (see `compare_runs.compare`)."""
    tensors = [tensor for tensor in (checkpoint or {}).get("tensors", ()) if tensor["kind"] == "parameters"]
    if any(tensor["relative"] is None and tensor["norm"] != 0 for tensor in tensors):
        return math.inf
    squares = [((tensor["relative"] or 0.0) * tensor["norm"], tensor["norm"]) for tensor in tensors]
    whole = math.hypot(*(norm for _, norm in squares))
    return math.hypot(*(distance for distance, _ in squares)) / whole if whole else 0.0


def judge(result: Mapping[str, Any]) -> str:
    """Judge what `compare_runs.compare` found: one of SAME, ROUNDING, DIFFERENT and OTHER_STEPS."""
    if result["is_identical"]:
        return SAME
    if result["parting"] is None:
        return OTHER_STEPS
    largest = result["largest"]
    is_small = largest is None or _read(largest["relative"]) <= TOLERANCE
    return ROUNDING if is_small and find_distance(result["checkpoint"]) <= TENSOR_TOLERANCE else DIFFERENT


def write(result: Mapping[str, Any]) -> Iterator[str]:
    """Write the verdict as lines of text."""
    largest, verdict = result["largest"], result["verdict"]
    amount = "all losses and evaluations of both are the same"
    if largest is not None:
        number = "no number" if largest["relative"] is None else f"{largest['relative']:.1e}"
        amount = (
            f"the largest relative difference of losses and evaluations is {number} ({largest['name']}, step "
            f"{largest['step']:,}; {TOLERANCE:.0e} is called rounding)"
        )
    if verdict == ROUNDING:
        yield f"verdict: {verdict}, not the same bits: {amount}"
        if result["checkpoint"] is not None:
            yield (
                "  single tensors may differ wholly all the same. Where the true gradient is 0, as of the biases of "
                "attention's keys, they and their moments hold nothing but rounding"
            )
        yield "  for the same bits on any number of processes, train both with --reproducible 4 (or another micro-batch)"
    elif verdict == DIFFERENT:
        distance = find_distance(result["checkpoint"])
        if largest is None or _read(largest["relative"]) <= TOLERANCE:
            amount += (
                f", but parameters differ by {distance:.1e} of their norm ({TENSOR_TOLERANCE:.0e} is called rounding)"
            )
        yield f"verdict: {verdict}: {amount}"
        if not {"recipe", "data"} & result["settings"].keys() and _begins_small(result["parting"]):
            yield (
                "  they part by as little as rounding, which long trainings let grow. To tell it from a fault, train both with "
                "--reproducible 4: what differs then is no rounding"
            )


def _begins_small(parting: Mapping[str, Any]) -> bool:
    """Tell whether the first difference is as small as rounding."""
    relatives = [item["relative"] for item in parting["metrics"].values() if item["values"][0] != item["values"][1]]
    return bool(relatives) and all(relative is not None and relative <= TOLERANCE for relative in relatives)
