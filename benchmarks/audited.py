"""Audits the training loops that people use, as their libraries document them: which take the step that they say?

    make bench NAME=audited                      all that is installed; --only NAME for some loops

Each loop is a short program of benchmarks/packages/ or benchmarks/loops/, with a tiny random model, no download, and the
versions of requirements.txt. It is run unchanged with 16 samples in one micro-batch, in 4 x 4 micro-batches, and on two
processes of 8 samples, as `python -m recipes audit-script` does it. Samples are 77 (nanoGPT's have no end), so that the last
window is partial. Every run is done again by packages/plain.py, which uses nothing of the audit, and must give the same errors.
Besides, two loops are killed and resumed, and classes of causal models are asked by `audit_packing` whether a row of packed
samples is the same as the samples. Writes benchmarks/results/audited.* and docs/audited.md.

Some loops need packages that requirements.txt does not have: benchmarks/loops-requirements.txt says how to install them, and
runs those loops. Where a loop's packages are missing, its earlier row is kept.
"""

import dataclasses
import os
import sys
import tempfile
import textwrap
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import causal_models
import harness
import plainly
from forked import AUDITED, Server
from plainly import TOLERANCE

from stepaudit import audit_packing
from stepaudit.causes import GUIDE, HARMLESS, KINDS
from stepaudit.judge import compare
from stepaudit.recording import Recording
from stepaudit.script import BATCH, FOLDER, WINDOW, Variation, compare_resumed_runs

TIMEOUT = 300  # seconds for a run
REFERENCE = (16, 1, 1)
CUT, TWO_PROCESSES = (4, 4, 1), (8, 1, 2)  # b, k, N


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop that people use.

    Attributes:
        group: of loops, by which they are counted.
        libraries: that it is made with.
        words: program in benchmarks/, and words of its command line.
        layouts: b, k, N.
    """

    group: str
    libraries: tuple[str, ...]
    words: tuple[str, ...]
    layouts: tuple[tuple[int, int, int], ...] = (CUT, TWO_PROCESSES)

    @property
    def program(self) -> str:
        return f"benchmarks/{self.words[0]}"

    @property
    def is_installed(self) -> bool:
        return all(_find_version(library) for library in self.libraries)


def _find_version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


TRL, TRAINER, ACCELERATE = ("trl", "transformers"), ("transformers",), ("accelerate", "transformers")
LIGHTNING, SENTENCES, TORCH = ("lightning",), ("sentence-transformers",), ("torch",)
STYLE = "in the style of "


def _list_loops(group: str, libraries: tuple[str, ...], program: str, modes: dict[str, str], **more) -> dict[str, Loop]:
    """List loops of one program: title -> the first word of its command line."""
    return {title: Loop(group, libraries, (program, *mode.split()), **more) for title, mode in modes.items()}


_TRL, _TRAINER, _EXAMPLES = "TRL", "transformers' Trainer", "Accelerate and loops on it"
_LIGHTNING, _SENTENCES, _OTHERS = "Lightning", "sentence-transformers", "other loops"
LOOPS = {
    **_list_loops(
        _TRL,
        TRL,
        "packages/trl_sft.py",
        {
            "TRL SFTTrainer, all tokens": "plain",
            "TRL SFTTrainer, assistant only": "assistant",
            "TRL SFTTrainer, packed": "packed",
            "TRL SFTTrainer, padding-free": "padding_free",
            "TRL SFTTrainer, DFT": "dft",
        },
    ),
    "TRL SFTTrainer, LoRA": Loop(_TRL, (*TRL, "peft"), ("packages/trl_sft.py", "lora")),
    "TRL DPOTrainer": Loop(_TRL, TRL, ("packages/trl_dpo.py",)),
    **_list_loops(
        _TRL,
        TRL,
        "packages/trl_preferences.py",
        {
            "TRL DPOTrainer, IPO": "ipo",
            "TRL DPOTrainer, sigmoid and SFT": "sft",
            "TRL DPOTrainer, AOT": "aot",
            "TRL DPOTrainer, BCO": "bco",
            "TRL KTOTrainer, APO": "apo",
            "TRL TPOTrainer": "tpo",
        },
    ),
    "TRL KTOTrainer": Loop(_TRL, TRL, ("packages/trl_kto.py",)),
    "TRL ORPOTrainer": Loop(_TRL, TRL, ("packages/trl_orpo.py",)),
    "TRL CPOTrainer": Loop(_TRL, TRL, ("packages/trl_cpo.py", "cpo")),
    "TRL CPOTrainer, SimPO": Loop(_TRL, TRL, ("packages/trl_cpo.py", "simpo")),
    "TRL RewardTrainer": Loop(_TRL, TRL, ("packages/trl_reward.py",)),
    **_list_loops(
        _TRL,
        TRL,
        "packages/trl_generating.py",
        {
            "TRL GRPOTrainer, GRPO": "grpo",
            "TRL GRPOTrainer, DAPO (default)": "dapo",
            "TRL RLOOTrainer": "rloo",
            "TRL DistillationTrainer": "distillation",
        },
    ),
    "TRL GRPOTrainer, BNPO": Loop(_TRL, TRL, ("packages/trl_generating.py", "bnpo")),
    "TRL GKDTrainer, given answers": Loop(_TRL, TRL, ("packages/trl_generating.py", "gkd")),
    **_list_loops(
        _TRAINER,
        TRAINER,
        "packages/trainer.py",
        {
            "Trainer, causal model of ragged texts": "plain",
            "Trainer, run_clm": "blocks",
            "Trainer, run_mlm": "masked",
            "Trainer, run_glue": "classifier",
        },
    ),
    **_list_loops(
        _TRAINER,
        TRAINER,
        "packages/trainer_heads.py",
        {
            "Trainer, GPT-2 of ragged texts": "gpt2",
            "Trainer, Mixtral with its balance loss": "moe",
            "Trainer, LLaVA": "llava",
            "Trainer, T5, run_summarization": "t5",
            "Trainer, BART, run_translation": "bart",
            "Trainer, Whisper, run_speech_recognition_seq2seq": "whisper",
            "Trainer, wav2vec2, run_speech_recognition_ctc, sum": "ctc",
            "Trainer, wav2vec2, run_speech_recognition_ctc, mean": "ctc_mean",
            "Trainer, run_ner": "ner",
            "Trainer, run_qa": "qa",
            "Trainer, run_swag": "swag",
            "Trainer, ViT, run_image_classification": "image_classification",
            "Trainer, ViT, run_mim": "mim",
            "Trainer, SegFormer, run_semantic_segmentation": "segmentation",
            "Trainer, CLIP, run_clip": "clip",
        },
    ),
    **_list_loops(
        _EXAMPLES,
        ACCELERATE,
        "packages/no_trainer.py",
        {
            "run_clm_no_trainer": "clm",
            "run_mlm_no_trainer": "mlm",
            "run_glue_no_trainer": "glue",
        },
    ),
    **_list_loops(
        _EXAMPLES,
        ACCELERATE,
        "packages/no_trainer_heads.py",
        {
            STYLE + name: mode
            for name, mode in {
                "run_ner_no_trainer": "ner",
                "run_translation_no_trainer": "translation",
                "run_summarization_no_trainer": "summarization",
                "run_qa_no_trainer": "qa",
                "run_swag_no_trainer": "swag",
                "run_image_classification_no_trainer": "image_classification",
                "run_semantic_segmentation_no_trainer": "semantic_segmentation",
                "run_mim_no_trainer": "mim",
            }.items()
        },
    ),
    **_list_loops(
        _EXAMPLES,
        ACCELERATE,
        "packages/accelerate_examples.py",
        {
            STYLE + "Accelerate's nlp_example": "nlp",
            STYLE + "Accelerate's by_feature/local_sgd": "local_sgd",
            STYLE + "diffusers' train_text_to_image": "diffusion",
        },
    ),
    "Accelerate, by_feature/gradient_accumulation": Loop(
        _EXAMPLES, ACCELERATE, ("loops/accelerate_documented.py", "--model", "bert_classifier")
    ),
    "Accelerate's guide, causal model of ragged texts": Loop(
        _EXAMPLES, ACCELERATE, ("loops/accelerate_documented.py", "--model", "gpt2")
    ),
    "Accelerate, by_feature/gradient_accumulation_for_autoregressive_models": Loop(
        _EXAMPLES, ACCELERATE, ("loops/accelerate_variable_length.py", "--model", "gpt2")
    ),
    "Lightning, samples of one length": Loop(_LIGHTNING, LIGHTNING, ("packages/lightning_automatic.py",)),
    "Lightning, causal model of ragged texts": Loop(
        _LIGHTNING, LIGHTNING, ("loops/lightning_documented.py", "--model", "gpt2"), (CUT,)
    ),
    **_list_loops(
        _LIGHTNING,
        LIGHTNING,
        "packages/lightning_guides.py",
        {
            "Lightning, guide to manual optimization": "manual",
            "Lightning Fabric, guide to gradient accumulation": "fabric",
        },
    ),
    **_list_loops(
        _SENTENCES,
        SENTENCES,
        "packages/sentence_pairs.py",
        {
            "sentence-transformers, cosine similarity": "cosine",
            "sentence-transformers, in-batch negatives": "negatives",
        },
    ),
    "sentence-transformers, cached negatives": Loop(_SENTENCES, SENTENCES, ("packages/sentence_pairs.py", "cached")),
    **_list_loops(
        _SENTENCES,
        SENTENCES,
        "packages/sentence_losses.py",
        {
            "sentence-transformers, CoSENT": "cosent",
            "sentence-transformers, triplets": "triplet",
            "sentence-transformers, contrastive": "contrastive",
            "sentence-transformers, online contrastive": "online_contrastive",
            "sentence-transformers, MarginMSE": "margin_mse",
            "sentence-transformers, batch-hard triplets": "batch_hard",
            "sentence-transformers, Matryoshka": "matryoshka",
            "sentence-transformers, cross-encoder": "cross_encoder",
        },
    ),
    **_list_loops(
        _OTHERS,
        TORCH,
        "packages/styles.py",
        {
            STYLE + "timm's train": "timm",
            STYLE + "open_clip's train, accum_freq": "open_clip",
            STYLE + "torchtune's full_finetune_single_device": "torchtune",
            STYLE + "OpenRLHF's sft_trainer": "openrlhf",
            STYLE + "verl's token-mean over the global batch": "verl",
        },
        layouts=(CUT,),
    ),
    "PyTorch Ignite, create_supervised_trainer": Loop(
        _OTHERS, ("pytorch-ignite",), ("packages/frameworks.py", "ignite"), (CUT,)
    ),
    "fastai, GradientAccumulation": Loop(_OTHERS, ("fastai",), ("packages/frameworks.py", "fastai"), (CUT,)),
    "pytorch-accelerated, Trainer": Loop(_OTHERS, ("pytorch-accelerated",), ("packages/frameworks.py", "accelerated")),
    "TorchTNT, AutoUnit": Loop(_OTHERS, ("torchtnt",), ("packages/frameworks.py", "torchtnt"), (CUT,)),
    "skorch, accumulation in a subclass": Loop(_OTHERS, ("skorch",), ("packages/frameworks.py", "skorch"), (CUT,)),
    "LitGPT, finetune full": Loop(_OTHERS, ("litgpt",), ("packages/litgpt_finetune.py",), (CUT,)),
    "nanoGPT": Loop(_OTHERS, TORCH, ("packages/nanogpt.py",)),
    "nanochat's chat_sft, its accumulation": Loop(
        _OTHERS, TORCH, ("loops/nanogpt_style.py", "--model", "gpt2"), (CUT,)
    ),
    "loss / k by hand, causal model of ragged texts": Loop(
        _OTHERS, TORCH, ("loops/divided_by_k.py", "--model", "gpt2"), (CUT,)
    ),
}
# What the code of a loop, or the plain computation, shows beside the table.
NOTES = {
    "sentence-transformers, cached negatives": "the other samples of the micro-batch are the negatives, fewer in a smaller one",
    "sentence-transformers, batch-hard triplets": "plainly, too, the processes step by different gradients: none is averaged",
    "sentence-transformers, cross-encoder": "two processes fail without the audit, too",
    "fastai, GradientAccumulation": "the last window has too few samples, and is never stepped, in micro-batches or without",
    "in the style of open_clip's train, accum_freq": "the learned scale gets k times its gradient, all else is exact"
    ". Windows that are not full are left out",
    "in the style of OpenRLHF's sft_trainer": "windows that are not full are left out, in either layout",
}
# Imported once, before the programs' processes are forked: what a program imports takes longer than its steps.
IMPORTED = (
    *AUDITED,
    "peft",
    "sentence_transformers",
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in (
            *("bart", "bert", "clip", "gpt2", "llama", "llava", "mixtral", "segformer"),
            *("t5", "vit", "wav2vec2", "whisper"),
        )
    ),
    *(f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "kto", "reward")),
    *(f"trl.trainer.{name}_trainer" for name in ("grpo", "rloo", "distillation")),
    *(f"trl.experimental.{name}.{name}_trainer" for name in ("orpo", "cpo", "tpo", "gkd")),
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


def record_plainly(server: Server, program: list[str], layout: tuple[int, int, int]) -> list[dict]:
    """Run packages/plain.py, and return what it saved on each process."""
    variation = make_variation(layout)
    with tempfile.TemporaryDirectory(prefix="plain-") as folder:
        server.run([folder, *program, *variation.argv], variation.num_processes, TIMEOUT, module="plain")
        return plainly.load_plain(Path(folder), variation.num_processes)


def measure(server: Server, title: str) -> dict:
    """Audit a loop under each of its layouts, and check each verdict by a plain computation."""
    loop, start = LOOPS[title], harness.clock()
    program = [str(ROOT / loop.program), *loop.words[1:]]
    reference = server.record(program, make_variation(REFERENCE), timeout=TIMEOUT)
    plain_reference = record_plainly(server, program, REFERENCE)
    runs = []
    for layout in loop.layouts:
        run = {"layout": "x".join(map(str, layout))}
        try:
            comparison = compare(
                reference,
                recordings := server.record(program, make_variation(layout), timeout=TIMEOUT),
                TOLERANCE,
            )
            checked = plainly.check(plain_reference, record_plainly(server, program, layout), comparison)
        except RuntimeError as error:  # some loops refuse several processes
            runs.append(run | {"failure": str(error).splitlines()[-1].strip()})
            continue
        runs.append(
            run
            | {
                "errors": [error if error == error else None for error in comparison.errors],
                "never_stepped": len(recordings[0].unfinished_micro_steps),
                "findings": [dataclasses.asdict(finding) for finding in comparison.findings],
                "check": checked,
            }
        )
    row = {
        "loop": title,
        "versions": {library: version(library) for library in loop.libraries},
        "command": " ".join([loop.program, *loop.words[1:]]),
        "runs": runs,
        "seconds": harness.clock() - start,
    }
    for run in runs:
        causes = [finding["cause"] for finding in run.get("findings", [])]
        agrees = run.get("check", {}).get("agrees", run.get("failure"))
        print(f"{title}, {run['layout']}: {_errors(run)}, {causes}, {agrees}", file=sys.stderr, flush=True)
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


def _is_exact(run: dict) -> bool:
    return "findings" in run and not {finding["cause"] for finding in run["findings"]} - HARMLESS


def _check(row: dict) -> str:
    """Say whether the plain computation agrees with the verdict of each layout."""
    answers = [run["check"]["agrees"] for run in row["runs"] if "check" in run]
    return "yes" if answers and all(answers) else "NO" if answers else "-"


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
    rows = sorted(results["rows"], key=lambda row: list(LOOPS).index(row["loop"]))
    lines = []
    for row in rows:
        program = row["command"].split()[0]
        causes = ", ".join(f"[`{f['cause']}`]({guide}#{f['cause']})" for f in _list_findings(row))
        lines.append(
            [
                f"[{row['loop']}]({root}{program})",
                ", ".join(f"{library} {number}" for library, number in row["versions"].items()),
                _errors(_find_run(row, CUT)),
                _errors(_find_run(row, TWO_PROCESSES)),
                causes or "none",
                _check(row),
            ]
        )
    found_causes = {finding["cause"] for row in rows for finding in _list_findings(row)}
    cures = [
        [f"`{cause}`", kind.text + (" (harmless)" if cause in HARMLESS else ""), _cure(cause)]
        for cause, kind in KINDS.items()
        if cause in found_causes
    ]
    notes = "".join(f"- {row['loop']}: {NOTES[row['loop']]}.\n" for row in rows if row["loop"] in NOTES)
    cut_rows = [row for row in rows if _find_run(row, CUT) is not None]
    exact_rows = [row for row in cut_rows if _is_exact(_find_run(row, CUT))]
    groups = []
    for group in dict.fromkeys(LOOPS[row["loop"]].group for row in cut_rows):
        numbers = [sum(LOOPS[row["loop"]].group == group for row in part) for part in (exact_rows, cut_rows)]
        groups.append([group, f"{numbers[0]} of {numbers[1]}"])
    summary = (
        f"On one process, in micro-batches, {len(exact_rows)} of {len(cut_rows)} loops take the step of the whole batch, the "
        "last one of the epoch included."
    )
    checks = [run["check"]["agrees"] for row in rows for run in row["runs"] if "check" in run]
    measured_titles = {row["loop"] for row in rows}
    missing = [title for title in LOOPS if title not in measured_titles]
    absent = f"Not installed here, and never measured: {', '.join(missing)}.\n" if missing else ""
    columns = "loop | with | error in 4 x 4 micro-batches, first / last step | on two processes of 8 | causes | checked plainly"
    return (
        f"{textwrap.fill(summary, 126)}\n"
        f"A plain computation of the same gradients, without the audit, agrees with {sum(checks)} of {len(checks)} verdicts.\n"
        f"{absent}\n"
        f"{harness.table('package | exact', groups)}\n"
        f"{harness.table(columns, lines)}\n"
        "The error is that of the gradient which the optimizer gets, relative. It is taken beside the same program with 16\n"
        f"samples in one micro-batch. Exact is at most {TOLERANCE:g}. Parameters are put back after every step, so that each\n"
        "error is its own.\n"
        "other samples: the step has not the reference's samples, so that its gradient is not compared. never: the last\n"
        "micro-batches are not stepped. A cause beside exact steps: both runs have the same fault (`shifted_labels`), or it\n"
        "does not reach the step (harmless).\n\n"
        "What the causes mean, and what cures them:\n\n"
        f"{harness.table('cause | what happens | cure', cures)}\n"
        f"What the code of some loops, or the plain computation, shows beside it:\n\n{notes}"
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
        f"do depends on the class of the model. Of transformers {results['about']['versions']['transformers']}, with eager\n"
        "attention and random weights, the gradient of five samples in one row was compared with that of the samples alone.\n"
        "There is no attention mask, and no other sign of where samples end (`stepaudit.audit_packing`).\n\n"
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
        "documents it, on a tiny random model. The last step of its samples has too few. Nothing is changed: the audit\n"
        "([audit.md](audit.md)) watches it from outside.\n\n"
        f"{overview(results, '../', Path(GUIDE).name)}\n"
        f"{packing(results)}\n"
        f"{resuming(results)}\n"
        "## By hand\n\n"
        "A loop, from the repository:\n\n"
        f"```text\nsamestep audit-script {vary} \\\n  -- benchmarks/packages/trl_dpo.py\n```\n\n"
        "Models are tiny, and samples are drawn: the size of an error is an example, its cause is not. A library's newer\n"
        "version may have mended what is said of an older one. Every number and place, and what the plain computation shows:\n"
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
            checked = run.get("check")
            plain = plainly.format_check(checked) if checked else "-"
            lines.append([row["loop"], f"`{row['command']}`", run["layout"], _errors(run), text, plain])
    columns = "loop | program | layout, b x k x N | error of the first / last step | found | plain computation"
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
    parser.add_argument("--extra", action="store_true", help="only loops that need benchmarks/loops-requirements.txt")
    arguments = parser.parse_args()
    titles = [title for title in arguments.only if LOOPS[title].is_installed]
    if arguments.extra:
        titles = [title for title in titles if set(LOOPS[title].libraries) - set(PACKAGES)]
    earlier = harness.read(arguments.output)
    is_whole = (len(arguments.only) == len(LOOPS) and not arguments.extra) or not earlier
    about = harness.about("make bench NAME=audited", PACKAGES)
    os.environ["PYTHONPATH"] = str(Path(__file__).parent / "packages")  # of the server: plain.py
    with Server(libraries=IMPORTED) as server:
        if is_whole:
            others = {"packing": measure_packing()}
            others["resuming"] = [row for title in RESUMED_LOOPS for row in measure_resuming(server, title)]
        else:
            others = {name: earlier[name] for name in ("packing", "resuming")}
        for number, title in enumerate(titles, 1):
            try:
                row = measure(server, title)
            except RuntimeError as error:  # its earlier row stays
                print(f"{title} is not measured: {error}", file=sys.stderr, flush=True)
                continue
            # Read again each time: several processes may measure some loops each.
            rows = [*harness.read_other_rows(arguments.output, "rows", "loop", [title]), row]
            rows = [row for row in rows if row["loop"] in LOOPS]
            results = {"about": about, "rows": rows, **others}
            harness.write(arguments.output, results, markdown(results), is_last=number == len(titles))
            if arguments.output.parent == harness.RESULTS:
                (ROOT / "docs" / "audited.md").write_text(guide(results), encoding="utf-8")


if __name__ == "__main__":
    main()
