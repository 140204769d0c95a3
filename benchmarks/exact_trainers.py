"""Does `exact(TrainerClass)` take the step of one large batch, by trainer, data, cut and number of processes?

    make bench NAME=exact_trainers               about 15 minutes; --only NAME for some trainers

Trainers of TRL, transformers and sentence-transformers take steps with tiny models in float32, without noise; the rate is 0, so
that each gradient is that of the first weights. Samples are ragged: 16, 19 (the last step has a tail) or 15 (one short). The
truth is the step of 8 samples, on 3 processes of 6, in one micro-batch: of the trainer as it is, of a head its own loss. What
counts is the largest relative error of a gradient, of all steps and numbers of samples. `rounding` is the error of the truth
itself, beside the same in float64. `plain` is the trainer as it is, in 4 x 2 micro-batches. Resumed: saved after the first step
in 4 x 2 micro-batches on one process, gone on with on 2 processes.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "CI": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import harness
import run_embedding_trainer
import torch
import trl_runs
from common import fresh_accelerator
from run_own_trainer import Gradients
from state import explain, quiet
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from samestep import exact
from samestep.contrib.heads import tiny
from samestep.contrib.heads.comparison import measure_distance
from samestep.errors import UsageError
from stepaudit.processes import run

NUM_SAMPLES = {"ragged": 16, "tail": 19, "one short": 15}
CUTS = ((8, 1, 1), (4, 2, 1), (1, 8, 1), (4, 1, 2), (2, 1, 3))  # b, k, N
PLAIN, RESUMED = (4, 2, 1), (4, 1, 2)
TIMEOUT = 3000  # seconds for all trainings of a cut
TRAINERS = {name: case[0].__name__ for name, case in trl_runs.make_cases().items()}
HEADS = {
    "GPT2LMHeadModel": Trainer,
    "Qwen2ForCausalLM": Trainer,
    "BertForSequenceClassification": Trainer,
    "BertForTokenClassification": Trainer,
    "BertForQuestionAnswering": Trainer,
    "BertForMultipleChoice": Trainer,
    "BertForMaskedLM": Trainer,
    "T5ForConditionalGeneration": Seq2SeqTrainer,
    "BartForConditionalGeneration": Seq2SeqTrainer,
    "WhisperForConditionalGeneration": Seq2SeqTrainer,
    "Wav2Vec2ForCTC": Trainer,
    "ViTForImageClassification": Trainer,
}
EMBEDDING = {f"embeddings, {name}": name for name in run_embedding_trainer.CASES | run_embedding_trainer.MORE_CASES}
NAMES = (*HEADS, *TRAINERS, *EMBEDDING)


# ---------------------------------------------------------------------------------------------------------------------
# A training


def train(name: str, num_samples: int, b: int, k: int, folder: Path, is_exact: bool = True, **more: Any) -> list:
    """Train an epoch, without learning, and return the gradient of each step that was taken."""
    fresh_accelerator()
    is_resumed = more.pop("is_resumed", False)
    if name in EMBEDDING:
        more |= {"output_dir": str(folder), "is_exact": is_exact, "is_resumed": is_resumed, "num_samples": num_samples}
        return run_embedding_trainer.train(EMBEDDING[name], b, k, **more)[0]
    options = {"learning_rate": 0.0, "train_sampling_strategy": "sequential", **more}
    if name in HEADS:
        head, gradients, base = tiny.find_head(name), Gradients(), HEADS[name]
        made = Seq2SeqTrainingArguments if base is Seq2SeqTrainer else TrainingArguments
        options = trl_runs.OPTIONS | {"per_device_train_batch_size": b, "gradient_accumulation_steps": k} | options
        trainer = (exact(base) if is_exact else base)(
            head.build(),
            made(str(folder), **options),
            data_collator=head.samples.join,
            train_dataset=[head.samples.draw(number) for number in range(num_samples)],
            callbacks=[gradients],
        )
    else:
        options = {"num_samples": num_samples, "dtype": torch.float32} | options
        trainer = trl_runs.make_trainer(name, folder, b, k, is_exact, **options)
        gradients = trainer.gradients
    trainer.train(resume_from_checkpoint=is_resumed or None)
    return gradients.all


def compute_truth(name: str, num_samples: int, size: int, folder: Path, is_wide: bool = False) -> list[torch.Tensor]:
    """Compute the gradients of steps of one micro-batch: of a head's own loss, or by the trainer as it is."""
    dtype = torch.float64 if is_wide else torch.float32
    if name not in HEADS:
        return train(name, num_samples, size, 1, folder, is_exact=False, dtype=dtype)
    head = tiny.find_head(name)
    model, gradients = head.build().train().to(dtype), []
    for first in range(0, num_samples, size):
        model.zero_grad()
        numbers = range(first, min(first + size, num_samples))
        batch = head.samples.join([head.samples.draw(number) for number in numbers])
        batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
        model(**batch).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return gradients


def work(folder: str, jobs: str) -> None:
    """Do the jobs on this process, and leave the gradients of each, or why it was refused, in RANK.pt."""
    found: dict[str, Any] = {}
    with quiet():
        for job, (function, arguments, options) in json.loads(jobs).items():
            try:
                found[job] = globals()[function](*arguments, folder=Path(folder) / job.partition(":")[2], **options)
            except UsageError as error:
                found[job] = str(error)
    torch.save(found, Path(folder) / f"{os.environ.get('RANK', '0')}.pt")
    os._exit(0)


# ---------------------------------------------------------------------------------------------------------------------
# Results


def run_jobs(jobs: dict[str, tuple], num_processes: int, folder: Path) -> dict[str, Any]:
    """Run jobs on some processes; all must find the same."""
    command = [sys.executable, __file__, "--work", str(folder), json.dumps(jobs)]
    run(command, num_processes, f"{len(jobs)} trainings on {num_processes} processes", TIMEOUT)
    first, *others = [torch.load(folder / f"{rank}.pt") for rank in range(num_processes)]
    for other in others:
        for job, found in first.items():
            if measure_error(other[job], found) != 0.0:
                sys.exit(f"{job}: processes do not have the same gradients")
    return first


def measure_error(found: Any, true: Any) -> float | str:
    """Compute the largest relative error of a step's gradient; what was refused stays a text."""
    if isinstance(found, str) or isinstance(true, str):
        return 0.0 if found == true else found if isinstance(found, str) else true
    pairs = [(x.to(y), y) for x, y in zip(found, true, strict=True)]
    return max((0.0 if torch.equal(x, y) else measure_distance(x, y) for x, y in pairs), default=0.0)


def measure(names: list[str], folder: Path) -> list[dict[str, Any]]:
    """Measure all trainers: for each cut the errors by data."""
    pairs = [(name, data) for name in names for data in NUM_SAMPLES]
    jobs: dict[int, dict[str, tuple]] = {1: {}, 2: {}, 3: {}}
    for name, data in pairs:
        number = NUM_SAMPLES[data]
        for size in (8, 6):
            jobs[1][f"true {size}:{name}-{data}"] = "compute_truth", (name, number, size), {}
        jobs[1][f"wide:{name}-{data}"] = "compute_truth", (name, number, 8), {"is_wide": True}
        jobs[1][f"plain:{name}-{data}"] = "train", (name, number, *PLAIN[:2]), {"is_exact": False}
        for b, k, num_processes in CUTS:
            if b > 1 or not name_wants_two(name):
                jobs[num_processes][f"{b} x {k} x {num_processes}:{name}-{data}"] = "train", (name, number, b, k), {}
        saved = {"save_strategy": "steps", "save_steps": 1}
        jobs[1][f"saved:{name}-{data}"] = "train", (name, number, *PLAIN[:2]), {"max_steps": 1, **saved}
        jobs[RESUMED[2]][f"resumed:{name}-{data}"] = (
            "train",
            (name, number, *RESUMED[:2]),
            {"is_resumed": True, **saved},
        )
    found: dict[str, Any] = {}
    for num_processes, some in jobs.items():
        is_saved = {job: not isinstance(found.get(job.replace("resumed", "saved"), ""), str) for job in some}
        found |= run_jobs(
            {job: some[job] for job in some if not job.startswith("resumed") or is_saved[job]}, num_processes, folder
        )
    return [make_row(name, found) for name in names]


def make_row(name: str, found: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "case": name,
        "trainer": _name_trainer(name),
        "errors": {},
        "rounding": max(
            measure_error(found[f"true 8:{name}-{data}"], found[f"wide:{name}-{data}"]) for data in NUM_SAMPLES
        ),
    }
    for cut in ("plain", *(f"{b} x {k} x {num}" for b, k, num in CUTS), "resumed"):
        errors = {}
        for data in NUM_SAMPLES:
            true = found[f"true {6 if cut.endswith('3') else 8}:{name}-{data}"]
            job = f"{cut}:{name}-{data}"
            true = true[1:] if cut == "resumed" else true
            if job in found and true:  # packed rows may be few: nothing is left behind the first step
                errors[data] = measure_error(found[job], true)
        refused = [error for error in errors.values() if isinstance(error, str)]
        if refused:
            row["refused"] = refused[0]
        elif errors:
            row["errors"][cut] = errors
    return row


def _name_trainer(name: str) -> str:
    return HEADS[name].__name__ if name in HEADS else TRAINERS.get(name, "SentenceTransformerTrainer")


def name_wants_two(name: str) -> bool:
    """Tell whether a trainer wants two samples in a micro-batch: KTO's."""
    return TRAINERS.get(name) == "KTOTrainer"


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
    arguments = harness.flags("exact_trainers", __doc__, only=NAMES).parse_args()
    rows = harness.read_other_rows(arguments.output, "rows", "case", arguments.only)
    with tempfile.TemporaryDirectory() as folder:
        rows += measure(list(arguments.only), Path(folder))
    rows.sort(key=lambda row: NAMES.index(row["case"]))
    about = harness.about(
        "make bench NAME=exact_trainers", ("torch", "transformers", "accelerate", "trl", "sentence-transformers"), 1
    )
    results = {"about": about, "rows": rows}
    harness.write(arguments.output, results, markdown(results))


def markdown(results: dict[str, Any]) -> str:
    cuts = ["plain", *(f"{b} x {k} x {num}" for b, k, num in CUTS), "resumed"]
    table, cases = [], trl_runs.make_cases()
    for row in results["rows"]:
        cells = [f"{row['rounding']:.0e}"] + [
            f"{max(row['errors'][cut].values()):.0e}" if cut in row["errors"] else "-" for cut in cuts
        ]
        options = cases[row["case"]][3] if row["case"] in cases else {}
        case = ", ".join(f"{key}={value}" for key, value in options.items()) or row["case"]
        table.append([row["trainer"], case, *cells, explain(row["refused"]) if "refused" in row else ""])
    exact_rows = [row for row in results["rows"] if "refused" not in row]
    outside = sum(
        error > max(1e-6, 2 * row["rounding"])
        for row in exact_rows
        for cut in cuts[1:]
        for error in row["errors"].get(cut, {}).values()
    )
    ours = [error for row in exact_rows for cut in cuts[1:] for error in row["errors"].get(cut, {}).values()]
    return harness.page(
        "exact(TrainerClass), by trainer and cut",
        "exact_trainers.py",
        results["about"],
        f"{len(exact_rows)} of {len(table)} trainers and losses are exact, with errors of at most {max(ours):.1e} in "
        f"{len(ours)} trainings in float32, {outside} of them above 1e-6 and above twice the rounding of the large batch; "
        "the others are refused before the first step.\n\n"
        f"{harness.table(['trainer', 'case', '`rounding`', '`plain`, 4 x 2', *cuts[1:], 'refused for'], table)}\n"
        "Columns: samples in a micro-batch, micro-batches, processes. Errors of the gradient of a step, relative, the largest "
        "of 16, 19 and 15 ragged samples. `rounding`: the large batch in float32 beside itself in float64. KTO's trainer wants "
        "two samples in a micro-batch.\n",
    )


if __name__ == "__main__":
    main()
