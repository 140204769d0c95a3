"""Audits trainers as they are installed, and compares every verdict with a plain computation of the same gradients.

    make bench NAME=packages

Each program of benchmarks/packages/ is run twice under each layout: by the audit, and by packages/plain.py, which uses nothing
of the audit and saves whole gradients at a rate of 0. The errors must be the same, and exact must mean exact. Writes
benchmarks/results/packages.*.
"""

import sys
import tempfile
from pathlib import Path

import harness
import numpy as np
import torch

from stepaudit.judge import HARMLESS, Comparison, compare
from stepaudit.processes import run
from stepaudit.script import BATCH, WINDOW, Variation, record

FOLDER = Path(__file__).parent / "packages"
LOOPS = Path(__file__).parent / "loops"
TOLERANCE = 1e-5
TIMEOUT = 300  # seconds for a run
WEIGHT_TOLERANCE = 1e-3  # relative; weights that differ less are the same
# Title -> program with its arguments.
PROGRAMS = {
    "TRL SFT": [FOLDER / "trl_sft.py", "plain"],
    "TRL SFT, assistant only": [FOLDER / "trl_sft.py", "assistant"],
    "TRL SFT, packed": [FOLDER / "trl_sft.py", "packed"],
    "TRL DPO": [FOLDER / "trl_dpo.py"],
    "TRL KTO": [FOLDER / "trl_kto.py"],
    "TRL Reward": [FOLDER / "trl_reward.py"],
    "Trainer, Llama": [FOLDER / "trainer.py", "plain"],
    "Trainer, Llama, evaluated every 2 steps": [FOLDER / "trainer.py", "evaluated"],
    "Trainer, BERT classifier": [FOLDER / "trainer.py", "classifier"],
    "Lightning, automatic": [FOLDER / "lightning_automatic.py"],
    "sentence-transformers, cosine": [FOLDER / "sentence_pairs.py", "cosine"],
    "sentence-transformers, in-batch negatives": [FOLDER / "sentence_pairs.py", "negatives"],
    "sentence-transformers, cached negatives": [FOLDER / "sentence_pairs.py", "cached"],
    "Accelerate, as documented, GPT-2": [LOOPS / "accelerate_documented.py", "--model", "gpt2"],
    "Accelerate's example for variable lengths, GPT-2": [LOOPS / "accelerate_variable_length.py", "--model", "gpt2"],
}
PACKAGES = ("torch", "accelerate", "transformers", "trl", "peft", "lightning", "sentence-transformers")
REFERENCE = (16, 1, 1)
LAYOUTS = [(4, 4, 1), (8, 1, 2)]  # b, k, N


def variation(layout: tuple[int, int, int]) -> Variation:
    return Variation({BATCH: str(layout[0]), WINDOW: str(layout[1])}, layout[2])


def run_plainly(program: list[str], layout: tuple[int, int, int]) -> list[dict]:
    """Run packages/plain.py, and return the values that it saved on each process."""
    run_variation = variation(layout)
    with tempfile.TemporaryDirectory(prefix="packages-") as folder:
        words = [str(FOLDER / "plain.py"), folder, *program, *run_variation.argv]
        run([sys.executable, *words], run_variation.num_processes, program[0], TIMEOUT)
        return load_plain(Path(folder), run_variation.num_processes)


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


def measure(title: str, program: list[str]) -> list[dict]:
    plain_reference, reference = run_plainly(program, REFERENCE), record(program, variation(REFERENCE), 0, TIMEOUT)
    rows = []
    for layout in LAYOUTS:
        comparison = compare(reference, record(program, variation(layout), 0, TIMEOUT), TOLERANCE)
        checked = check(plain_reference, run_plainly(program, layout), comparison)
        row = {
            "program": title,
            "layout": "x".join(map(str, layout)),
            **checked,
            "errors": [error if error == error else None for error in comparison.errors],
            "findings": [
                {
                    "cause": finding.cause,
                    "where": finding.where,
                    "evidence": finding.evidence,
                    "harmless": finding.cause in HARMLESS,
                }
                for finding in comparison.findings
            ],
        }
        print(
            title,
            row["layout"],
            row["own_cause"],
            [finding["cause"] for finding in row["findings"]],
            row["agrees"],
            file=sys.stderr,
        )
        rows.append(row)
    return rows


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


def markdown(results: dict) -> str:
    lines = []
    for row in results["rows"]:
        causes = ", ".join(f"`{finding['cause']}`" for finding in row["findings"]) or "exact"
        samples_text = str(row["samples"])
        if row["samples"] != row["samples_of_the_reference"]:
            samples_text += f" instead of {row['samples_of_the_reference']}"
        cells = [row["program"], row["layout"], _format_errors(row["own_errors"]), samples_text, row["own_cause"]]
        lines.append([*cells, _format_errors(row["errors"]), causes, "yes" if row["agrees"] else "NO"])
    columns = "trainer | layout | plain computation | samples used | what it shows | audit | named | agree"
    return harness.page(
        "Trainers as they are installed, audited",
        "packages.py",
        results["about"],
        "Relative error of the gradient of the first / the last step beside one micro-batch of 16: by a plain computation,\n"
        "and by the audit (-: its samples are others, and it is not compared). 77 samples, so that the last window is "
        f"partial.\n\n{harness.table(columns, lines)}\n"
        f"Exact: at most {TOLERANCE:g}.\n",
    )


def main() -> None:
    arguments = harness.flags("packages", __doc__).parse_args()
    rows = []
    for title, program in PROGRAMS.items():
        rows += measure(title, [str(word) for word in program])
    results = {"about": harness.about("make bench NAME=packages", PACKAGES), "rows": rows}
    harness.write(arguments.output, results, markdown(results))


if __name__ == "__main__":
    main()
