"""Measures how far the loops that are documented, and copied, are from the exact step: benchmarks/loops/ on every model.

    make bench NAME=loops

All take the same 77 samples in the same order, 32 in a step, and are recorded by the audit (`python -m recipes audit-script`),
which compares each with benchmarks/loops/exact.py in one micro-batch, and names what it finds.
"""

import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks" / "loops"))

import harness
import numpy as np
from tasks import MODELS

from stepaudit.judge import CAUSES, compare
from stepaudit.recording import Recording
from stepaudit.script import BATCH, WINDOW, Variation, record

TOLERANCE = 1e-6  # transformers computes GPT-2's loss in float32
LOOPS = {
    "exact": "the exact step",
    "divided_by_k": "loss / k by hand",
    "step_mod_k": "loss / k by hand, a step when `step % k == 0`",
    "nanogpt_style": "nanoGPT",
    "accelerate_documented": "Accelerate, `accumulate`",
    "lightning_documented": "Lightning, `accumulate_grad_batches`",
    "accelerate_variable_length": "Accelerate's example for variable lengths",
    "transformers_trainer": "transformers' Trainer",
}
HEADS = {
    "gpt2": "GPT-2",
    "bert_mlm": "BERT MLM",
    "bert_pretraining": "BERT MLM + NSP",
    "bert_classifier": "BERT classifier",
    "resnet": "ResNet (BatchNorm)",
}
LIMITED_MODELS = {"accelerate_variable_length": ("gpt2", "bert_mlm")}
NUM_WHOLE_STEPS = {"nanogpt_style": 2}  # its batches have no end, hence no last window
CASES_ON_ONE_PROCESS = [(loop, model, 8, 4) for loop in LOOPS for model in LIMITED_MODELS.get(loop, MODELS)]
CASES_ON_TWO_PROCESSES = [
    ("transformers_trainer", "bert_classifier", 16, 1),
    ("transformers_trainer", "bert_classifier", 4, 4),
    ("accelerate_documented", "gpt2", 16, 1),
    *(("exact", model, 4, 4) for model in MODELS if model != "resnet"),
]


def run(loop: str, model: str, b: int, k: int, num_processes: int = 1) -> list[Recording]:
    """Run a loop, and return the recording of every process."""
    program = [str(ROOT / "benchmarks" / "loops" / f"{loop}.py"), "--model", model]
    variation = Variation({BATCH: str(b), WINDOW: str(k)}, num_processes)
    return record(program, variation, NUM_WHOLE_STEPS.get(loop, 0), timeout=300)


def compute_errors(reference: list[Recording], other: list[Recording]) -> list[float]:
    """Compute |g - r| / |r| of every step, also where its samples are not the reference's."""
    steps = zip(reference[0].steps, other[0].steps, strict=False)
    return [float(np.linalg.norm(g.gradient - r.gradient) / np.linalg.norm(r.gradient)) for r, g in steps]


def measure(reference: list[Recording], loop: str, model: str, b: int, k: int, num_processes: int) -> dict:
    recordings = run(loop, model, b, k, num_processes)
    if loop in NUM_WHOLE_STEPS:
        reference = [
            dataclasses.replace(recording, steps=recording.steps[: NUM_WHOLE_STEPS[loop]]) for recording in reference
        ]
    return {
        "loop": loop,
        "model": model,
        "layout": {"b": b, "k": k, "N": num_processes},
        "errors": compute_errors(reference, recordings),
        "last_window_steps": not recordings[0].unfinished_micro_steps,
        "findings": [dataclasses.asdict(finding) for finding in compare(reference, recordings, TOLERANCE).findings],
    }


def main() -> None:
    arguments = harness.flags("loops", __doc__).parse_args()
    references = {model: run("exact", model, 32, 1) for model in MODELS}
    rows = []
    for num_processes, cases in ((1, CASES_ON_ONE_PROCESS), (2, CASES_ON_TWO_PROCESSES)):
        for loop, model, b, k in cases:
            rows.append(measure(references[model], loop, model, b, k, num_processes))
            print(loop, model, rows[-1]["layout"], _cell(rows[-1]), file=sys.stderr, flush=True)
    packages = ("torch", "accelerate", "transformers", "lightning")
    results = {"about": harness.about("make bench NAME=loops", packages, tolerance=TOLERANCE), "rows": rows}
    harness.write(arguments.output, results, parts={"loops": ("exactness.md", part(results))})


def _cell(row: dict) -> str:
    """Format the errors of the first and the last step."""
    first, *_, last = ["exact" if error <= TOLERANCE else f"{error:#.2g}" for error in row["errors"]]
    if row["loop"] in NUM_WHOLE_STEPS:
        return first
    return f"{first} / {last}" if row["last_window_steps"] else f"{first} / never"


def _causes(row: dict) -> str:
    return ", ".join(f"`{finding['cause']}`" for finding in row["findings"]) or "exact"


def _grid(rows: list[dict], cell) -> str:
    """Make a table with a line for every loop and a column for every model."""
    cells = {(row["loop"], row["model"]): cell(row) for row in rows}
    lines = [[title, *(cells.get((loop, model), "-") for model in HEADS)] for loop, title in LOOPS.items()]
    return harness.table(["loop", *HEADS.values()], lines)


def tables(results: dict) -> str:
    rows_on_one_process, rows_on_two_processes = (
        [row for row in results["rows"] if row["layout"]["N"] == number] for number in (1, 2)
    )
    causes = {finding["cause"] for row in results["rows"] for finding in row["findings"]}
    legend = "".join(f"- `{cause}`: {text}\n" for cause, text in CAUSES.items() if cause in causes)
    lines = [
        [
            *(LOOPS[row["loop"]], HEADS[row["model"]], row["layout"]["b"], row["layout"]["k"], _cell(row)),
            "; ".join(f"`{finding['cause']}`, {finding['where']}: {finding['evidence']}" for finding in row["findings"])
            or "exact",
        ]
        for row in rows_on_two_processes
    ]
    return (
        "Relative error of the gradient that the optimizer takes, first / last step, on one process with 8 samples in a\n"
        "micro-batch and k = 4. Steps have 32, 32 and 13 samples: the last window has 2 micro-batches, of 8 and 5.\n"
        "never: the last micro-batches are never stepped. nanoGPT's batches have no end, so there is no last window.\n\n"
        f"{_grid(rows_on_one_process, _cell)}\n"
        "What the audit names:\n\n"
        f"{_grid(rows_on_one_process, _causes)}\n"
        f"{legend}\n"
        "On two processes:\n\n"
        f"{harness.table('loop | model | b | k | error of the first / last step | named', lines)}\n"
        "Every loop is a script in benchmarks/loops/, as its library documents it. Parameters are put back after every step,\n"
        "so that each step's error is its own. Models are tiny and without dropout, samples are random, of 4 to 64 tokens:\n"
        "errors that depend on the data are examples.\n"
        f"Exact: at most {results['about']['tolerance']:g}, in float64 (transformers computes GPT-2's loss in float32).\n"
    )


def part(results: dict) -> str:
    return harness.part("loops.py", results["about"], tables(results))


if __name__ == "__main__":
    main()
