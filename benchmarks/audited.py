"""Audits the training loops that people use, as their libraries document them: which take the step that they say?

    make bench NAME=audited                      all of it, about 5 minutes; --only NAME for some loops

Each loop is a short program of benchmarks/packages/ or benchmarks/loops/, with a tiny random model, no download, and the
versions of requirements.txt. It is run unchanged with 16 samples in one micro-batch, in 4 x 4 micro-batches, and on two
processes of 8 samples, as `python -m recipes audit-script` does it. Samples are 77 (nanoGPT's have no end), so that the last
window is partial. Besides, two loops are killed and resumed, and classes of causal models are asked by `audit_packing` whether
a row of packed samples is the same as the samples. Writes benchmarks/results/audited.* and docs/audited.md.
"""

import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import causal_models
import harness
from forked import AUDITED, Server

from stepaudit import audit_packing
from stepaudit.causes import GUIDE, HARMLESS, KINDS
from stepaudit.judge import compare, find_faults
from stepaudit.recording import Recording
from stepaudit.script import BATCH, FOLDER, WINDOW, Variation, compare_resumed_runs

TOLERANCE = 1e-5
TIMEOUT = 300  # seconds for a run
REFERENCE = (16, 1, 1)
CUT, TWO_PROCESSES = (4, 4, 1), (8, 1, 2)  # b, k, N


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop that people use.

    Attributes:
        libraries: that it is made with.
        words: program in benchmarks/, and words of its command line.
        layouts: b, k, N.
        note: what its code shows where the audit says no more than `not_a_sum`.
    """

    libraries: tuple[str, ...]
    words: tuple[str, ...]
    layouts: tuple[tuple[int, int, int], ...] = (CUT, TWO_PROCESSES)
    note: str = ""

    @property
    def program(self) -> str:
        return f"benchmarks/{self.words[0]}"


TRL, TRAINER, ACCELERATE = ("trl", "transformers"), ("transformers",), ("accelerate", "transformers")
TERMS = "two terms, a mean over tokens and one over pairs, each of the micro-batch: their counts differ"
CACHED = "the other samples of the micro-batch are the negatives: there are fewer in a smaller one"
LIGHTNING, SENTENCES, TORCH = ("lightning",), ("sentence-transformers",), ("torch",)
LOOPS = {
    "TRL SFTTrainer, all tokens": Loop(TRL, ("packages/trl_sft.py", "plain")),
    "TRL SFTTrainer, assistant only": Loop(TRL, ("packages/trl_sft.py", "assistant")),
    "TRL SFTTrainer, packed": Loop(TRL, ("packages/trl_sft.py", "packed")),
    "TRL SFTTrainer, LoRA": Loop((*TRL, "peft"), ("packages/trl_sft.py", "lora")),
    "TRL DPOTrainer": Loop(TRL, ("packages/trl_dpo.py",)),
    "TRL KTOTrainer": Loop(TRL, ("packages/trl_kto.py",)),
    "TRL ORPOTrainer": Loop(TRL, ("packages/trl_orpo.py",), note=TERMS),
    "TRL CPOTrainer": Loop(TRL, ("packages/trl_cpo.py", "cpo"), note=TERMS),
    "TRL CPOTrainer, SimPO": Loop(TRL, ("packages/trl_cpo.py", "simpo")),
    "TRL RewardTrainer": Loop(TRL, ("packages/trl_reward.py",)),
    "Trainer, causal model of ragged texts": Loop(TRAINER, ("packages/trainer.py", "plain")),
    "Trainer, run_clm": Loop(TRAINER, ("packages/trainer.py", "blocks")),
    "Trainer, run_mlm": Loop(TRAINER, ("packages/trainer.py", "masked")),
    "Trainer, run_glue": Loop(TRAINER, ("packages/trainer.py", "classifier")),
    "run_clm_no_trainer": Loop(ACCELERATE, ("packages/no_trainer.py", "clm")),
    "run_mlm_no_trainer": Loop(ACCELERATE, ("packages/no_trainer.py", "mlm")),
    "run_glue_no_trainer": Loop(ACCELERATE, ("packages/no_trainer.py", "glue")),
    "Accelerate, by_feature/gradient_accumulation": Loop(
        ACCELERATE, ("loops/accelerate_documented.py", "--model", "bert_classifier")
    ),
    "Accelerate's guide, causal model of ragged texts": Loop(
        ACCELERATE, ("loops/accelerate_documented.py", "--model", "gpt2")
    ),
    "Accelerate, by_feature/gradient_accumulation_for_autoregressive_models": Loop(
        ACCELERATE, ("loops/accelerate_variable_length.py", "--model", "gpt2")
    ),
    "Lightning, samples of one length": Loop(LIGHTNING, ("packages/lightning_automatic.py",)),
    "Lightning, causal model of ragged texts": Loop(
        LIGHTNING, ("loops/lightning_documented.py", "--model", "gpt2"), (CUT,)
    ),
    "sentence-transformers, cosine similarity": Loop(SENTENCES, ("packages/sentence_pairs.py", "cosine")),
    "sentence-transformers, in-batch negatives": Loop(SENTENCES, ("packages/sentence_pairs.py", "negatives")),
    "sentence-transformers, cached negatives": Loop(SENTENCES, ("packages/sentence_pairs.py", "cached"), note=CACHED),
    "nanoGPT": Loop(TORCH, ("packages/nanogpt.py",)),
    "nanochat's chat_sft, its accumulation": Loop(TORCH, ("loops/nanogpt_style.py", "--model", "gpt2"), (CUT,)),
    "loss / k by hand, causal model of ragged texts": Loop(TORCH, ("loops/divided_by_k.py", "--model", "gpt2"), (CUT,)),
}
# Imported once, before the programs' processes are forked: what a program imports takes longer than its steps.
IMPORTED = (
    *AUDITED,
    "peft",
    "sentence_transformers",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    *(f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "kto", "reward")),
    *(f"trl.experimental.{name}.{name}_trainer" for name in ("orpo", "cpo")),
)
# Loops that save and resume -> program, with checkpoints after every step.
SAVED = ("--output_dir", FOLDER, "--optim", "adamw_torch")
RESUMED_LOOPS = {
    "Trainer, run_clm": ("packages/trainer.py", "blocks", *SAVED),
    "run_clm_no_trainer": ("packages/no_trainer.py", "clm", *SAVED),
    "run_clm_no_trainer, use_seedable_sampler=True": ("packages/no_trainer.py", "seeded", *SAVED),
}
RESUMED_LAYOUTS = [(8, 2, 1), (4, 4, 1), (8, 1, 2)]
STOP, NUM_RESUMED_STEPS = 2, 2
PACKAGES = ("torch", "accelerate", "transformers", "trl", "peft", "lightning", "sentence-transformers")


def make_variation(layout: tuple[int, int, int]) -> Variation:
    return Variation({BATCH: str(layout[0]), WINDOW: str(layout[1])}, layout[2])


def measure(server: Server, title: str) -> dict:
    """Audit a loop under each of its layouts."""
    loop, start = LOOPS[title], harness.clock()
    program = [str(ROOT / loop.program), *loop.words[1:]]
    reference = server.record(program, make_variation(REFERENCE), timeout=TIMEOUT)
    runs = []
    for layout in loop.layouts:
        run = {"layout": "x".join(map(str, layout))}
        try:
            recordings = server.record(program, make_variation(layout), timeout=TIMEOUT)
        except RuntimeError as error:  # some loops refuse several processes
            runs.append(run | {"failure": str(error).splitlines()[-1].strip()})
            continue
        comparison = compare(reference, recordings, TOLERANCE)
        runs.append(
            run
            | {
                "errors": [error if error == error else None for error in comparison.errors],
                "never_stepped": len(recordings[0].unfinished_micro_steps),
                "findings": [dataclasses.asdict(finding) for finding in comparison.findings],
            }
        )
    row = {
        "loop": title,
        "libraries": list(loop.libraries),
        "command": " ".join([loop.program, *loop.words[1:]]),
        "faults_of_the_reference": [dataclasses.asdict(finding) for finding in find_faults(reference)],
        "runs": runs,
        "seconds": harness.clock() - start,
    }
    for run in runs:
        causes = [finding["cause"] for finding in run.get("findings", [])]
        print(f"{title}, {run['layout']}: {_errors(run)}, {causes}", file=sys.stderr, flush=True)
    return row


def measure_packing() -> list[dict]:
    """Ask every class of causal models whether it keeps packed samples apart."""
    rows = []
    for name in causal_models.CONFIGS:
        findings = audit_packing(causal_models.build(name), causal_models.SAMPLES)
        rows.append({"model": name, "findings": [dataclasses.asdict(finding) for finding in findings]})
    return rows


def measure_resuming(server: Server, title: str) -> list[dict]:
    """Kill a loop after `STOP` steps, and resume it under each layout."""
    program, *words = RESUMED_LOOPS[title]
    runs = [make_variation(layout) for layout in RESUMED_LAYOUTS]

    def record(words: list[str], variation: Variation, num_steps: int, mode: str) -> list[Recording]:
        return server.record(words, variation, num_steps, TIMEOUT, mode)

    _, comparisons = compare_resumed_runs(
        [str(ROOT / "benchmarks" / program), *words],
        runs,
        Variation({"resume_from_checkpoint": "last"}, 1),
        STOP,
        NUM_RESUMED_STEPS,
        TOLERANCE,
        record,
    )
    rows = []
    for layout, comparison in zip(RESUMED_LAYOUTS, comparisons, strict=True):
        row = {"loop": title, "layout": "x".join(map(str, layout)), "never_stepped": 0}
        row["errors"] = [error if error == error else None for error in comparison.errors]
        row["findings"] = [dataclasses.asdict(finding) for finding in comparison.findings]
        print(f"{title}, resumed, {row['layout']}: {_errors(row)}, {row['findings']}", file=sys.stderr, flush=True)
        rows.append(row)
    return rows


# ------------------------------------------------------------------------------------------------ pages


def _errors(run: dict | None) -> str:
    """Format the errors of the first and of the last step; "other samples" where these are not the reference's."""
    if run is None:
        return "not run"
    if "failure" in run:
        return "fails"
    if not run["errors"]:
        return "not compared"
    is_other = any(finding["cause"] == "other_inputs" for finding in run["findings"])
    first, last = (
        "other samples"
        if error is None or (is_other and error > TOLERANCE)
        else "exact"
        if error <= TOLERANCE
        else f"{error:.2g}"
        for error in (run["errors"][0], run["errors"][-1])
    )
    return f"{first} / {'never' if run['never_stepped'] else last}"


def _find_run(row: dict, layout: tuple[int, int, int]) -> dict | None:
    return next((run for run in row["runs"] if run["layout"] == "x".join(map(str, layout))), None)


def _list_findings(row: dict) -> list[dict]:
    """List the first finding of each cause, the harmless ones last."""
    by_cause: dict[str, dict] = {}
    for finding in [finding for run in row["runs"] for finding in run.get("findings", [])]:
        by_cause.setdefault(finding["cause"], finding)
    return sorted(by_cause.values(), key=lambda finding: finding["cause"] in HARMLESS)


def _cure(cause: str) -> str:
    """Return the first part of a cause's remedy: the guide has the rest."""
    return KINDS[cause].remedy.partition("; shortest")[0]


def overview(results: dict, root: str, guide: str) -> str:
    """Make the table of all loops, and that of the causes.

    Args:
        root: link from the page to the root of the repository.
        guide: link from the page to the guide of the audit.
    """
    versions = results["about"]["versions"]
    rows = sorted(results["rows"], key=lambda row: list(LOOPS).index(row["loop"]))
    lines = []
    for row in rows:
        program = row["command"].split()[0]
        causes = ", ".join(f"[`{f['cause']}`]({guide}#{f['cause']})" for f in _list_findings(row))
        lines.append(
            [
                f"[{row['loop']}]({root}{program})",
                ", ".join(f"{library} {versions[library]}" for library in row["libraries"]),
                _errors(_find_run(row, CUT)),
                _errors(_find_run(row, TWO_PROCESSES)),
                causes or "none",
            ]
        )
    found_causes = {finding["cause"] for row in rows for finding in _list_findings(row)}
    cures = [
        [f"`{cause}`", kind.text + (" (harmless)" if cause in HARMLESS else ""), _cure(cause)]
        for cause, kind in KINDS.items()
        if cause in found_causes
    ]
    notes = "".join(f"- {title}: {loop.note}.\n" for title, loop in LOOPS.items() if loop.note)
    num_exact = sum(
        "findings" in run and not {finding["cause"] for finding in run["findings"]} - HARMLESS
        for row in rows
        if (run := _find_run(row, CUT)) is not None
    )
    num_cut = sum(_find_run(row, CUT) is not None for row in rows)
    columns = "loop | with | error in 4 x 4 micro-batches, first / last step | on two processes of 8 | causes"
    return (
        f"On one process, in micro-batches, {num_exact} of {num_cut} loops take the step of the whole batch, the last window\n"
        "of the epoch included.\n\n"
        f"{harness.table(columns, lines)}\n"
        "The error is that of the gradient which the optimizer gets, relative, beside the same program with 16 samples in one\n"
        f"micro-batch; exact: at most {TOLERANCE:g}. Parameters are put back after every step, so that each error is its own.\n"
        "other samples: the step has not the reference's samples, so that its gradient is not compared. never: the last\n"
        "micro-batches are not stepped. A cause beside exact steps: both runs have the same fault (`shifted_labels`), or it\n"
        "does not reach the step (harmless).\n\n"
        "What the causes mean, and what cures them:\n\n"
        f"{harness.table('cause | what happens | cure', cures)}\n"
        f"Where the audit says no more than `not_a_sum`, the code of the loops shows it:\n\n{notes}"
    )


def resuming(results: dict) -> str:
    """Make the table of loops that are killed and resumed."""
    lines = [
        [
            *(row["loop"], row["layout"], _errors(row)),
            "; ".join(f"`{f['cause']}`: {f['evidence']}" for f in row["findings"]) or "goes on as undisturbed",
        ]
        for row in results["resuming"]
    ]
    return (
        "## Does a run that was killed go on as it would have?\n\n"
        f"Killed in {'x'.join(map(str, RESUMED_LAYOUTS[0]))} (samples x micro-batches x processes) after {STOP} steps, with a\n"
        "checkpoint after every step, and resumed as the library documents it; AdamW. The gradients of the next steps, beside\n"
        "those of the run that went on (`audit-script --resume`):\n\n"
        f"{harness.table('loop | resumed in | error of the first / last step | found', lines)}"
    )


def packing(results: dict) -> str:
    """Make the table of models that are given packed rows."""
    kept = [f"`{row['model']}`" for row in results["packing"] if not row["findings"]]
    lines = [
        [f"`{row['model']}`", f"`{finding['where']}`", finding["evidence"]]
        for row in results["packing"]
        for finding in row["findings"]
    ]
    return (
        "## Is a packed row the same as its samples?\n\n"
        "Packing puts samples end to end in one row; `position_ids`, which begin anew in each, tell them apart. Whether they\n"
        f"do depends on the class of the model. transformers {results['about']['versions']['transformers']}, eager attention,\n"
        "random weights, no attention mask and no other sign of where samples end: the gradient of five samples in one row,\n"
        "beside that of the samples alone (`stepaudit.audit_packing`):\n\n"
        f"The same: {', '.join(kept)}.\n\n"
        "A sample sees the one in front of it:\n\n"
        f"{harness.table('model | where samples first mix | how far the row is off', lines)}"
    )


def guide(results: dict) -> str:
    """Make docs/audited.md."""
    vary = " \\\n  ".join(f'--vary "{BATCH}={b},{WINDOW}={k}"' for b, k, _ in (REFERENCE, CUT))
    return (
        "# Loops that people use, audited\n\n"
        f"Generated by `{results['about']['command']}` (benchmarks/audited.py); do not edit.\n\n"
        "Which training loops take the step that they say they take, however its samples are cut? Each is run as its library\n"
        "documents it, on a tiny random model and samples of which the last window has too few, and is not changed: the audit\n"
        "([audit.md](audit.md)) watches it from outside.\n\n"
        f"{overview(results, '../', Path(GUIDE).name)}\n"
        f"{packing(results)}\n"
        f"{resuming(results)}\n"
        "## By hand\n\n"
        "A loop, from the repository:\n\n"
        f"```text\nsamestep audit-script {vary} \\\n  -- benchmarks/packages/trl_dpo.py\n```\n\n"
        "Models are tiny, and samples are drawn: the size of an error is an example, its cause is not. A library's newer\n"
        "version may have mended what is said of an older one. A plain computation of the same gradients, without the audit,\n"
        "confirms many of these verdicts: [packages.md](../benchmarks/results/packages.md). Every number and place:\n"
        "[audited.md](../benchmarks/results/audited.md).\n\n"
        f"{harness.provenance(results['about'])}.\n"
    )


def markdown(results: dict) -> str:
    """Make results/audited.md: the tables, and each finding with its place and numbers."""
    lines = []
    for row in sorted(results["rows"], key=lambda row: list(LOOPS).index(row["loop"])):
        for run in row["runs"]:
            findings = "; ".join(
                f"`{finding['cause']}`, {finding['where']}: {finding['evidence']}"
                for finding in run.get("findings", [])
            )
            text = f"fails: {run['failure']}" if "failure" in run else findings or "exact"
            lines.append([row["loop"], f"`{row['command']}`", run["layout"], _errors(run), text])
    columns = "loop | program | layout, b x k x N | error of the first / last step | found"
    return harness.page(
        "Loops that people use, audited",
        "audited.py",
        results["about"],
        f"{overview(results, '../../', f'../../{GUIDE}')}\n"
        f"Every finding:\n\n{harness.table(columns, lines)}\n"
        f"{packing(results)}\n"
        f"{resuming(results)}",
    )


def main() -> None:
    parser = harness.flags("audited", __doc__, only=LOOPS)
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "audited.md", help="the page of them")
    arguments = parser.parse_args()
    rows = harness.read_other_rows(arguments.output, "rows", "loop", arguments.only)
    rows = [row for row in rows if row["loop"] in LOOPS]
    about = harness.about("make bench NAME=audited", PACKAGES)
    packed_rows = measure_packing()
    with Server(libraries=IMPORTED) as server:
        resumed_rows = [row for title in RESUMED_LOOPS for row in measure_resuming(server, title)]
        for number, title in enumerate(arguments.only, 1):
            rows.append(measure(server, title))
            results = {"about": about, "rows": rows, "packing": packed_rows, "resuming": resumed_rows}
            harness.write(arguments.output, results, markdown(results), is_last=number == len(arguments.only))
            arguments.document.write_text(guide(results), encoding="utf-8")


if __name__ == "__main__":
    main()
