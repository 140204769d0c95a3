"""Do the loss curves of `--speed auto` and `--speed safe` agree?

    make bench NAME=choices

Every program with its small recipe, 50 steps, in float32 and in bf16. Beside the safe run:

- cut: the safe way, in four micro-batches. The same step, other rounding: how far apart curves are that differ in nothing else.
- auto: whatever `--speed auto` measures to be the fastest.
- other: the kernels that safe did not take, of texts in float32 those of products too, in eight micro-batches, as if those had
  been the fastest; not where `--speed auto` refuses them because their gradient is not that of the safe ones.

Shown is the largest |loss - safe's| / safe's of the first step and of all.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import harness

from samestep.models.cpu_matmul import ONEDNN

STEPS = 50
IMAGES, TEXTS = ("channels_last", "channels_first"), ("eager", "sdpa")
# Program -> recipe, its global batch, the ways to compute it, and flags.
PROGRAMS = {
    "pretrain_bert": ("bert_small_cpu", 16, TEXTS, "--short_seq_probability 0.5 --validation_fraction 0"),
    "pretrain_gpt2": ("gpt2_small_cpu", 16, TEXTS, "--validation_fraction 0"),
    "finetune_classifier": ("finetune_small_cpu", 32, TEXTS, "--validation_fraction 0"),
    "train_image_classifier": ("resnet_digits_cpu", 64, IMAGES, "--validation_fraction 0"),
    "train_captcha": ("captcha_cpu", 32, IMAGES, "--num_train_samples 3200 --num_validation_samples 64"),
}


def run(program: str, precision: str, flags: str, work: Path) -> tuple[list[float], str]:
    """Run a program; the losses of its steps, and its output."""
    recipe, batch, _, more = PROGRAMS[program]
    words = harness.launch(harness.ROOT / "scripts" / f"{program}.py", precision)
    words += ["--recipe", recipe, "--global_batch_size", str(batch)]
    words += [*more.split(), *flags.split(), "--stop_after_step", str(STEPS)]
    words += ["--output_dir", str(work / "run"), "--overwrite_output_dir"]
    printed = harness.run(words, HF_HOME=work / "cache")
    return [line["loss"] for line in harness.read_steps(work / "run")], printed


def choice(printed: str) -> str:
    """Read the choice that a run reports.

    >>> choice("kernels: eager (--speed auto)\\nmicro-batches: at most 4096 tokens at once (--speed auto)\\n")
    'eager, at most 4096 tokens at once'
    """
    return ", ".join(re.findall(r"^(?:kernels|micro-batches): (.*) \(--speed \w+\)$", printed, re.MULTILINE))


def force(file: Path, way: str, at_once: int | None) -> None:
    """Replace each measured choice in a file of `samestep.training.capacity` by a given one."""
    entries = {key: values | {"way": way, "at_once": at_once} for key, values in json.loads(file.read_text()).items()}
    file.write_text(json.dumps(entries))


def deviations(losses: list[float], safe: list[float]) -> tuple[float, float]:
    """Compute the relative deviation of the first step, and the largest of all.

    >>> deviations([1.0, 1.5, 2.0], [1.0, 2.0, 2.0])
    (0.0, 0.25)
    """
    errors = [abs(a - b) / abs(b) for a, b in zip(losses, safe, strict=True)]
    return errors[0], max(errors)


def measure(program: str, precision: str, work: Path) -> list[dict]:
    """Make a row for every run but the safe one."""
    _, batch, ways, _ = PROGRAMS[program]
    safe, printed = run(program, precision, "--speed safe", work)
    safe_way = choice(printed)
    losses, _ = run(program, precision, f"--speed safe --per_device_train_batch_size {batch // 4}", work)
    runs = {"cut": (losses, f"{safe_way}, {batch // 4} samples at once")}
    losses, printed = run(program, precision, "--speed auto", work)
    runs["auto"] = losses, choice(printed)
    (other,) = (way for way in ways if way != safe_way)
    if ways is TEXTS and precision == "no":
        other = f"{other}, {ONEDNN}"
    if refused := re.search(rf"^kernels: not {other}: (.*)$", printed, re.MULTILINE):
        runs["other"] = None, f"{other}: refused, {refused[1]}"
    else:
        force(work / "cache" / "samestep" / "capacity.json", other, batch // 8)
        losses, printed = run(program, precision, "--speed auto", work)
        runs["other"] = losses, choice(printed)
    rows = []
    for name, (losses, description) in runs.items():
        first, largest = (None, None) if losses is None else deviations(losses, safe)
        rows.append({"program": program, "precision": precision, "safe": safe_way, "run": name, "taken": description})
        rows[-1] |= {"first": first, "largest": largest, "losses": losses}
        print({key: value for key, value in rows[-1].items() if key != "losses"}, file=sys.stderr, flush=True)
    return rows


def main() -> None:
    arguments = harness.flags("choices", __doc__, only=PROGRAMS, precisions=True).parse_args()
    rows = []
    for program in arguments.only:
        for precision in arguments.precisions:
            with tempfile.TemporaryDirectory() as folder:
                rows += measure(program, precision, Path(folder))
    about = harness.about("make bench NAME=choices", ("torch", "transformers", "accelerate"))
    results = {"about": about, "rows": rows}
    harness.write(arguments.output, results, markdown(results))


def markdown(results: dict) -> str:
    rows = [
        [
            *(row[name] for name in ("program", "precision", "run", "taken")),
            *("-" if row[name] is None else f"{row[name]:.1e}" for name in ("first", "largest")),
        ]
        for row in results["rows"]
    ]
    return harness.page(
        "The loss curves of --speed auto and --speed safe",
        "choices.py",
        results["about"],
        f"|loss - safe's| / safe's, of the first step and the largest of {STEPS}:\n\n"
        f"{harness.table('program | precision | run | kernels, micro-batches | first step | largest', rows)}",
    )


if __name__ == "__main__":
    main()
