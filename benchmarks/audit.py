"""Audits this repository: is every script exact, and what does it cost to find out?

    make audit

- scripts: each is run unchanged on a tiny model under several layouts, as `python -m recipes audit-script` does, and compared
  with its run that computes the whole global batch in one forward. A documented loop that takes the mean of means is the
  control, which must fail. Their table is shown in docs/exactness.md, too.
- kernels: whatever `--speed auto` may choose on this machine, in two micro-batches, beside the safe kernels that take the whole
  global batch in one forward. In bf16 what counts as the same is what auto itself takes for it.
- recording: steps of GPT-2 124M, each once plain and once recorded, by turns in one process.
- audit_step: seconds for two tiny models, with its default cuts.
"""

import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

HOME = tempfile.TemporaryDirectory(prefix="audit-benchmark-")
# Before torch and datasets are imported; the runs inherit it.
os.environ.update(HF_HOME=HOME.name, HF_HUB_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import harness
import torch
from choices import IMAGES, TEXTS, force
from common import DROPOUT, metrics, tiny_argv, write_corpus
from forked import Server
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from samestep.models.attention import BY_LENGTH
from samestep.models.cpu_matmul import ONEDNN
from samestep.training import capacity, kernels
from stepaudit import audit_step
from stepaudit.judge import Comparison, compare
from stepaudit.record import Recorder
from stepaudit.script import BATCH, WINDOW, Variation, record

TOLERANCE = 1e-5
TIMEOUT = 200  # seconds for a run
# Documents so short that epochs end within the steps.
SHORT = "--train_file CORPUS/short.jsonl"
# Name -> program, its B, and flags beside its tiny model's.
SCRIPTS = {
    "BERT": ("pretrain_bert", 32, f"{SHORT} --epoch_end keep"),
    "BERT, dropout 0.1": ("pretrain_bert", 32, SHORT + DROPOUT),
    "GPT-2, packed": ("pretrain_gpt2", 16, f"{SHORT} --epoch_end keep"),
    "GPT-2, packed, document mask": ("pretrain_gpt2", 16, f"{SHORT} --document_mask true"),
    "GPT-2, a document per sample": ("pretrain_gpt2", 32, f"{SHORT} --packing false"),
    "GPT-2, dropout 0.1": (
        "pretrain_gpt2",
        32,
        f"{SHORT} --packing false --embd_pdrop 0.1 --resid_pdrop 0.1 --attn_pdrop 0.1",
    ),
    "BERT classifier": ("finetune_classifier", 32, "--epoch_end keep"),
    "Llama on chats": ("finetune_causal_lm", 32, "--epoch_end keep"),
    "Llama on pairs, DPO": (
        "finetune_causal_lm",
        16,
        "--dataset_name builtin/drawn_pairs --train_on completions --objective dpo --sft_loss_weight 0.2 --epoch_end keep",
    ),
    "ResNet, normalised by groups": ("train_image_classifier", 32, "--validation_fraction 0.95 --epoch_end keep"),
    "ResNet, exact batch normalisation": ("train_image_classifier", 32, "--normalization batch --exact_batch_norm"),
    # In fp32 about 1e-5 of its gradient is rounding, of one batch as of any cut: beside float64 both are that far off.
    "captcha reader, in float64": ("train_captcha", 16, "--dtype float64"),
}
LAYOUTS = [(5, 1), (1, 1), (3, 2), (4, 3)]  # b, N
# What `--speed auto` may choose for a script on a CPU; of texts in float32 products by oneDNN besides.
BERT = (*TEXTS, *(kernel + BY_LENGTH for kernel in TEXTS))
KERNELS = {
    "BERT": BERT,
    "GPT-2, packed": TEXTS,
    "BERT classifier": BERT,
    "Llama on chats": TEXTS,
    "ResNet, normalised by groups": IMAGES,
    "captcha reader, in float64": IMAGES,
}
CONTROL = "accelerate_documented"
PAIRS, WARM_UP = 9, 1
TOKENS = 1024  # in a step of GPT-2 124M
REPEATS = 3  # of every audit_step
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


# ------------------------------------------------------------------------------------------------ exactness


def run_script(server: Server, name: str, b: int, num_processes: int, corpus: Path, speed: str = "safe") -> tuple:
    """Run a script under one layout, in processes that need not wait for imports.

    Returns:
        Its variation, the recordings of its processes, and the lines that the script itself logged.
    """
    program, batch, more_flags = SCRIPTS[name]
    output_dir = corpus.parent / f"{name}-{b}-{num_processes}"
    flags = f"--max_train_steps 8 --global_batch_size {batch} --speed {speed} --overwrite_output_dir {more_flags}"
    argv = tiny_argv(program, corpus, output_dir, flags)
    variation = Variation({BATCH: str(b)}, num_processes)
    words = [str(ROOT / "scripts" / f"{program}.py"), *argv]
    if speed == "auto":  # for so tiny micro-batches as these attention by length would take one table, as others do
        words = [str(ROOT / "benchmarks" / "peers" / "tables.py"), *words]
    recordings = server.record(words, variation, 0, TIMEOUT)
    return variation, recordings, metrics(output_dir)


def audit_scripts(folder: Path, names: list[str]) -> list[dict]:
    corpus, rows = write_corpus(folder), []
    with Server() as server:
        for name in names:
            program, batch, more_flags = SCRIPTS[name]
            reference, reference_recordings, lines = run_script(server, name, batch, 1, corpus)
            for layout in LAYOUTS:
                variation, recordings, _ = run_script(server, name, *layout, corpus)
                row = {
                    "script": name,
                    "command": f"scripts/{program}.py --global_batch_size {batch} {more_flags}".strip(),
                    "smallest_step": min(line["samples"] for line in lines),
                    "epochs": lines[-1]["epoch"],
                    "reference": str(reference),
                    "layout": str(variation),
                    **to_row(compare(reference_recordings, recordings, TOLERANCE), TOLERANCE),
                }
                print(name, row["layout"], max(row["errors"]), row["exact"], file=sys.stderr, flush=True)
                rows.append(row)
    return rows


def list_kernels(name: str, precision: str) -> list[str]:
    """List the names of a script's kernels, with those that also choose the kernel of products."""
    names, is_text = KERNELS[name], KERNELS[name] is not IMAGES
    return [*names, *(f"{kernel}, {ONEDNN}" for kernel in names if is_text and precision == "no")]


def audit_kernels(folder: Path, names: Iterable[str] = KERNELS) -> list[dict]:
    """Audit every kernel of scripts in every precision, and return a row for each."""
    corpus, rows = write_corpus(folder), []
    for precision in ("no", "bf16"):
        tolerance = TOLERANCE if precision == "no" else kernels.TOLERANCE[precision]
        with mock.patch.dict(os.environ, ACCELERATE_MIXED_PRECISION=precision), Server() as server:
            for name in [name for name in names if precision == "no" or "float64" not in name]:
                batch = SCRIPTS[name][1]
                reference, reference_recordings, _ = run_script(server, name, batch, 1, corpus)
                run_script(server, name, batch // 2, 1, corpus, "auto")  # so that something is remembered
                for kernel in list_kernels(name, precision):
                    force(capacity.FILE, kernel, None)
                    variation, recordings, _ = run_script(server, name, batch // 2, 1, corpus, "auto")
                    if {choice["way"] for choice in json.loads(capacity.FILE.read_text()).values()} != {kernel}:
                        sys.exit(f"{name} in {precision} has no kernel {kernel}")  # and has measured anew
                    row = {"script": name, "precision": precision, "kernel": kernel, "tolerance": tolerance}
                    row |= {"reference": str(reference), "layout": str(variation)}
                    rows.append(row | to_row(compare(reference_recordings, recordings, tolerance), tolerance))
                    print(
                        name, precision, kernel, max(rows[-1]["errors"]), rows[-1]["exact"], file=sys.stderr, flush=True
                    )
    return sorted(rows, key=lambda row: list(KERNELS).index(row["script"]))


def control() -> dict:
    """Audit the mean of means of Accelerate's guide, on samples of different lengths."""

    def run(loop: str, b: int, k: int) -> tuple:
        program = str(ROOT / "benchmarks" / "loops" / f"{loop}.py")
        variation = Variation({BATCH: str(b), WINDOW: str(k)}, 1)
        return variation, record([program, "--model", "gpt2"], variation, 0, TIMEOUT)

    reference, reference_recordings = run("exact", 32, 1)
    variation, recordings = run(CONTROL, 8, 4)
    row = {"script": f"`benchmarks/loops/{CONTROL}.py`", "reference": f"benchmarks/loops/exact.py, {reference}"}
    return row | {"layout": str(variation), **to_row(compare(reference_recordings, recordings, TOLERANCE), TOLERANCE)}


def to_row(comparison: Comparison, tolerance: float) -> dict:
    return {
        "errors": list(map(float, comparison.errors)),
        "loss_errors": list(map(float, comparison.loss_errors)),
        "worst": comparison.worst,
        "worst_error": float(comparison.worst_error),
        "findings": [dataclasses.asdict(finding) for finding in comparison.findings],
        "exact": comparison.is_exact and max(comparison.loss_errors) <= tolerance,
    }


# ------------------------------------------------------------------------------------------------ costs


def recording_overhead(k: int) -> dict:
    """Measure the seconds of a step of GPT-2 124M in k micro-batches, plain and recorded."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other wherever something else runs
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**NO_DROPOUT)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = torch.randint(50257, (k, 1, TOKENS // k))
    recorder = Recorder()

    def time_step() -> float:
        start = harness.clock()
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=batch, labels=batch).loss / k
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return harness.clock() - start

    def time_recorded_step() -> float:
        with recorder:
            return time_step()

    times = harness.in_turns({"plain": time_step, "recorded": time_recorded_step}, PAIRS, WARM_UP)
    torch.set_num_threads(threads)
    assert len(recorder.recording.steps) == WARM_UP + PAIRS
    ratios = harness.ratios(times["recorded"], times["plain"])
    print(f"k {k}: {ratios}", file=sys.stderr, flush=True)
    return {
        "k": k,
        "plain": statistics.median(times["plain"]),
        "recorded": statistics.median(times["recorded"]),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


class PlainModel(nn.Module):
    """Computes two layers over ragged samples."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(200, 32)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 200)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(input_ids)))


def pad_samples(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    pad_sequence = nn.utils.rnn.pad_sequence
    labels = pad_sequence(samples, batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp(min=0), "attention_mask": (labels >= 0).long(), "labels": labels}


def sum_and_count(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    output, labels = model(batch["input_ids"]), batch["labels"][:, 1:]
    logits = (output if isinstance(output, torch.Tensor) else output.logits)[:, :-1]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, (labels != -100).sum()


def gpt2() -> GPT2LMHeadModel:
    shape = {"vocab_size": 200, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**shape, **NO_DROPOUT, bos_token_id=0, eos_token_id=0))


# Name -> model, loss.
SUBJECTS = {
    "plain module, sums and counts": (PlainModel, sum_and_count),
    "GPT2LMHeadModel, sums and counts": (gpt2, sum_and_count),
    "GPT2LMHeadModel, its own loss as Trainer accumulates it": (gpt2, None),
}


def audit_step_seconds(title: str, processes: tuple[int, ...]) -> dict:
    torch.manual_seed(0)
    samples = [torch.randint(200, (length,)) for length in torch.randint(3, 40, (16,)).tolist()]
    build, loss = SUBJECTS[title]
    model, seconds = build(), []
    for _ in range(REPEATS):
        start = harness.clock()
        audit = audit_step(model, samples, pad_samples, loss, processes=processes)
        seconds.append(harness.clock() - start)
        print(f"audit_step, {title}, {processes}: {seconds[-1]:.2f} s", file=sys.stderr, flush=True)
    return {
        "subject": title,
        "processes": list(processes),
        "cuts": len(audit.cuts),
        "seconds": statistics.median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "exact": audit.is_exact,
        "causes": sorted(audit.causes),
    }


# ------------------------------------------------------------------------------------------------ results


def main() -> int:
    parser = harness.flags("audit", __doc__)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--only", nargs="+", choices=SCRIPTS, help="audit only these scripts; all else stays as it was")
    only.add_argument(
        "--kernels",
        nargs="*",
        choices=KERNELS,
        help="audit only kernels, of all or these scripts; all else stays as it was",
    )
    arguments = parser.parse_args()

    if arguments.kernels is not None:
        names = arguments.kernels or list(KERNELS)
        results = replace_rows(arguments.output, "kernels", names, audit_kernels(Path(HOME.name), names))
    elif arguments.only:
        rows = audit_scripts(Path(HOME.name), arguments.only)
        results = replace_rows(arguments.output, "scripts", arguments.only, rows)
    else:
        results = measure_all()
    parts = {"audit": ("exactness.md", overview(results))}
    harness.write(arguments.output, results, markdown(results), parts=parts)
    return 0 if is_as_promised(results) else 1


def replace_rows(output: Path, group: str, names: Iterable[str], rows: list[dict]) -> dict:
    """Read earlier results, and put rows of scripts that are measured anew in the place of theirs."""
    results = json.loads(output.with_suffix(".json").read_text())
    known = list(SCRIPTS if group == "scripts" else KERNELS)
    rows = harness.read_other_rows(output, group, "script", names) + rows
    rows = [row for row in rows if row["script"] in known]
    return results | {group: sorted(rows, key=lambda row: known.index(row["script"]))}


def measure_all() -> dict:
    packages, details = (
        ("torch", "accelerate", "transformers"),
        {"tolerance": TOLERANCE, "pairs": PAIRS, "repeats": REPEATS},
    )
    return {
        "about": harness.about("make audit", packages, **details),
        "scripts": audit_scripts(Path(HOME.name), list(SCRIPTS)),
        "kernels": audit_kernels(Path(HOME.name)),
        "control": control(),
        "recording": [recording_overhead(k) for k in (1, 4)],
        "audit_step": [audit_step_seconds(title, processes) for title in SUBJECTS for processes in ((1,), (1, 2))],
    }


def is_as_promised(results: dict) -> bool:
    """Tell whether every script is exact with every kernel, and the control is not."""
    return all(row["exact"] for row in results["scripts"] + results["kernels"]) and not results["control"]["exact"]


def overview(results: dict) -> str:
    """Make a table with a line for every script, a column for every layout, and the largest error of its steps."""
    scripts = list(dict.fromkeys(row["script"] for row in results["scripts"]))
    layouts = list(dict.fromkeys(row["layout"] for row in results["scripts"]))
    micro_batches = {(row["script"], row["layout"]): row for row in results["scripts"]}
    lines = []
    for script in scripts:
        rows = [micro_batches[script, layout] for layout in layouts]
        errors = [f"{max(row['errors']):.1e}" + ("" if row["exact"] else " **not exact**") for row in rows]
        lines.append([script, *errors])
    control_row, num_steps = results["control"], len(results["scripts"][0]["errors"])
    return (
        f"{harness.table(['script', *layouts], lines)}\n"
        f"Each column is a layout: at most b samples in a forward, on N processes. A number is the largest relative error\n"
        f"of the gradient in {num_steps} steps in fp32 (float64 where it is named), beside the whole global\n"
        f"batch in one forward; exact is at most {results['about']['tolerance']:g}. "
        f"The control, a loop as Accelerate documents it, has {max(control_row['errors']):.2g}.\n"
        "More: [benchmarks/results/audit.md](../benchmarks/results/audit.md).\n"
    )


def _verdict(is_exact: bool, causes: list[str]) -> str:
    return "exact" if is_exact else f"NOT exact: {', '.join(f'`{cause}`' for cause in causes)}"


def _row(row: dict, *titles: str) -> list:
    verdict = _verdict(row["exact"], [finding["cause"] for finding in row["findings"]])
    return [
        *(*titles, row["layout"], len(row["errors"]), f"{row['errors'][0]:.1e}, {row['errors'][-1]:.1e}"),
        *(f"{max(row['loss_errors']):.1e}", f"{row['worst_error']:.1e} `{row['worst']}`", verdict),
    ]


def _table(names: list[str], rows: list[list]) -> str:
    head = ("layout", "steps", "error of the first, last step", "loss error", "worst parameter", "verdict")
    return harness.table([*names, *head], rows)


def markdown(results: dict) -> str:
    about, scripts, control_row = results["about"], results["scripts"], results["control"]
    rows_by_script = {row["script"]: row for row in scripts}
    runs = "".join(
        f"- {title}: `{row['command']}`, in {row['reference']}. {len(row['errors'])} steps are {row['epochs']:.2f} "
        f"epochs; samples in the smallest: {row['smallest_step']}.\n"
        for title, row in rows_by_script.items()
    )
    kernel_rows = [_row(row, row["script"], row["precision"], row["kernel"]) for row in results["kernels"]]
    recording = [
        [
            *(f"{row['k']} x {TOKENS // row['k']}", f"{row['plain']:.2f}", f"{row['recorded']:.2f}"),
            f"{row['ratio']:.3f} ({row['ratio_min']:.3f} to {row['ratio_max']:.3f})",
        ]
        for row in results["recording"]
    ]
    steps = [
        [
            *(row["subject"], " and ".join(map(str, row["processes"])), row["cuts"]),
            f"{row['seconds']:.1f} ({row['seconds_min']:.1f} to {row['seconds_max']:.1f})",
            _verdict(row["exact"], row["causes"]),
        ]
        for row in results["audit_step"]
    ]
    return harness.page(
        "The audit, turned on this repository",
        "audit.py",
        about,
        "## Scripts\n\n"
        "Relative errors of what the optimizer gets, in fp32 (float64 where it is named), beside a run that takes the whole "
        "global batch in one forward.\n"
        f"Exact: gradient and loss of every step within {about['tolerance']:g}, and nothing found.\n\n"
        f"{_table(['script'], [_row(row, row['script']) for row in scripts])}\n"
        f"The references:\n\n{runs}\n"
        "Models are tiny and without dropout. Gradients are compared before and after clipping.\n\n"
        "The control, which must fail:\n\n"
        f"{_table(['script'], [_row(control_row, control_row['script'])])}\n"
        f"Its reference is {control_row['reference']}.\n\n"
        "## Kernels\n\n"
        "What `--speed auto` may choose, beside the safe kernels that take the whole global batch in one forward, in the same "
        "precision.\n"
        f"Exact: within {about['tolerance']:g}, in bf16 within {kernels.TOLERANCE['bf16']:g}, and nothing found.\n\n"
        f"{_table(['script', 'precision', 'kernels'], kernel_rows)}\n"
        "## Costs\n\n"
        f"Recording a step of GPT-2 124M, {TOKENS} tokens, bf16, fused AdamW, one thread, in seconds:\n\n"
        f"{harness.table('micro-batches x tokens | plain | recorded | recorded / plain', recording)}\n"
        f"Medians of {about['pairs']} pairs (smallest to largest), by turns in one process.\n\n"
        "`audit_step` with its default cuts of 16 ragged samples, tiny models, in seconds:\n\n"
        f"{harness.table('model and loss | processes | cuts | seconds | verdict', steps)}\n"
        f"Medians of {about['repeats']} (smallest to largest).\n",
    )


if __name__ == "__main__":
    sys.exit(main())
