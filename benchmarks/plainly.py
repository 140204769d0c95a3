"""Compares what packages/plain.py saved of a loop, whole gradients at a rate of 0, with the audit: for benchmarks/audited.py.

The errors must be the same, and exact must mean exact.
"""

from pathlib import Path

import numpy as np
import torch

from stepaudit.judge import Comparison

TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-3  # relative; weights that differ less are the same


def load_plain(folder: Path, num_processes: int) -> list[dict]:
    """Load what packages/plain.py saved on each process."""
    return [torch.load(folder / f"saved-{rank}.pt") for rank in range(num_processes)]


def compute_errors(reference: list[dict], other: list[dict]) -> list[float]:
    """Compute |g - r| / |r| of each step."""
    steps = zip(reference[0]["steps"], other[0]["steps"], strict=False)
    return [float((g["gradient"] - r["gradient"]).norm() / r["gradient"].norm()) for r, g in steps]


def describe_miscount(processes: list[dict], step: int) -> str:
    """Describe by which number causal models divide, if it is not the number of labels that they predict; else empty."""
    counts = [count for process in processes for count in process["steps"][step]["counts"]]
    numbers, predicted = {number for number, _ in counts}, sum(count for _, count in counts)
    if len(numbers) != 1 or numbers == {predicted}:
        return ""
    return f"divided by {numbers.pop():.0f}, of which {predicted} are predicted"


def explain_step(reference: list[dict], other: list[dict], step: int) -> str:
    """Explain a step on one process by full gradients: by the weights of the micro-batches that make it the reference's."""
    if len(other) > 1 or len(other[0]["steps"][step]["after"]) < 2:
        return ""
    # Differences of the accumulated gradients after each backward: [micro-batches, numbers], transposed.
    gradients = other[0]["steps"][step]["after"]
    parts = torch.stack(gradients).diff(dim=0, prepend=torch.zeros_like(gradients[0])[None]).T.numpy()
    reference_gradient = reference[0]["steps"][step]["gradient"].numpy()
    weights, *_ = np.linalg.lstsq(parts, reference_gradient, rcond=None)
    if np.linalg.norm(parts @ weights - reference_gradient) > 10 * TOLERANCE * np.linalg.norm(reference_gradient):
        return "no weights of the micro-batches give it"
    if np.ptp(weights) <= WEIGHT_TOLERANCE * np.abs(weights).max():
        return f"{weights.mean():.4g} times the sum of the micro-batches"
    return "micro-batches weighted by " + ", ".join(f"{weight:.3g}" for weight in weights)


def count_samples(processes: list[dict]) -> tuple[int, int]:
    """Count the samples that were drawn, and the different ones among them."""
    indices = [index for process in processes for batch in process["batches"] for index in batch]
    return len(indices), len(set(indices))


def check(plain_reference: list[dict], plain_runs: list[dict], comparison: Comparison) -> dict:
    """Compare a verdict of the audit with the plain computation."""
    true_errors = compute_errors(plain_reference, plain_runs)
    wrong_steps = [t for t, error in enumerate(true_errors) if not error <= TOLERANCE]
    (num_samples, distinct), (num_reference_samples, reference_distinct) = map(
        count_samples, (plain_runs, plain_reference)
    )
    num_steps, num_reference_steps = len(plain_runs[0]["steps"]), len(plain_reference[0]["steps"])
    miscount = describe_miscount(plain_runs, 0)
    # Samples that come twice change a gradient, or are drawn for nothing; those that are left out change none that is taken.
    is_exact = not (wrong_steps or miscount) and distinct >= reference_distinct and num_steps == num_reference_steps
    error_pairs = [(a, b) for a, b in zip(comparison.errors, true_errors, strict=False) if a == a]
    agrees = comparison.is_exact == is_exact and all(abs(a - b) <= max(0.2 * b, TOLERANCE) for a, b in error_pairs)
    return {
        "own_errors": true_errors,
        "own_cause": miscount or (explain_step(plain_reference, plain_runs, wrong_steps[0]) if wrong_steps else ""),
        "samples": num_samples,
        "samples_of_the_reference": num_reference_samples,
        "agrees": agrees,
    }


def _format_errors(errors: list[float | None]) -> str:
    ends = errors[0], errors[-1]
    return " / ".join("-" if error is None else "exact" if error <= TOLERANCE else f"{error:.2g}" for error in ends)


def format_check(checked: dict) -> str:
    """Say in a line what the plain computation shows, and whether the audit agrees with it."""
    parts = [_format_errors(checked["own_errors"])]
    if checked["samples"] != checked["samples_of_the_reference"]:
        parts.append(f"{checked['samples']} samples instead of {checked['samples_of_the_reference']}")
    parts += [checked["own_cause"]] if checked["own_cause"] else []
    return "; ".join([*parts, "agrees" if checked["agrees"] else "DISAGREES"])
