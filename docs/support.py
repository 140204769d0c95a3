"""Makes the tables of what is supported, of launch files and of recipes, from the code's own rules and the planner."""

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from harness import table

from samestep.errors import UsageError
from samestep.recipe import run_settings
from samestep.recipe.catalog import TASKS, catalog_names, load
from samestep.recipe.exclusions import RULES, find_refusal
from samestep.recipe.variants import Algorithm
from stepplan.hardware import parse
from stepplan.methods import METHODS
from stepplan.placement import Placement, place
from stepplan.text import format_seconds
from stepplan.workload import from_recipe

TITLES = {
    "bert_pretraining": "BERT pretraining",
    "modernbert_pretraining": "ModernBERT pretraining",
    "gpt2_pretraining": "GPT-2 pretraining",
    "causal_lm_pretraining": "GPT of today, pretraining",
    "text_classification": "classifier of texts",
    "causal_lm_finetuning": "language model, fine-tuned",
    "seq2seq_finetuning": "sequence to sequence",
    "embedding_training": "embeddings of texts",
    "image_classification": "classifier of images",
    "captcha_recognition": "captchas",
}
ADAMW_FOLDED = "--accumulation optimizer --second_moment unbiased"
SGD = (
    "--optimizer sgd --sgd_momentum 0.9 --adam_beta1 none --adam_beta2 none --adam_epsilon none --lr_scaling_rule none"
)
WAYS = {
    "bert_pretraining": {"": "", "accumulation in AdamW": ADAMW_FOLDED},
    "modernbert_pretraining": {"Muon": ""},
    "gpt2_pretraining": {"": "", "accumulation in AdamW": ADAMW_FOLDED},
    "causal_lm_pretraining": {"Muon": ""},
    "text_classification": {"": "", "accumulation in AdamW": ADAMW_FOLDED},
    "causal_lm_finetuning": {},  # those of the planner
    "seq2seq_finetuning": {"": "", "accumulation in AdamW": ADAMW_FOLDED},
    "embedding_training": {"": "", "accumulation in AdamW": ADAMW_FOLDED},
    "image_classification": {
        "group normalisation": "--normalization group",
        "batch normalisation": "--normalization batch",
        "exact batch normalisation": "--normalization batch --exact_batch_norm true",
        "accumulation in SGD": f"--normalization group {SGD} --accumulation optimizer",
    },
    "captcha_recognition": {
        "group normalisation": "--normalization group",
        "batch normalisation": "--normalization batch",
        "exact batch normalisation": "--normalization batch --exact_batch_norm true",
    },
}
"""Task -> ways to train it, and their flags."""
LAUNCHES = [(precision, is_sharded) for is_sharded in (False, True) for precision in ("no", "bf16", "fp16")]
HEADS = [f"{'FSDP2, ' if is_sharded else ''}{precision.replace('no', 'fp32')}" for precision, is_sharded in LAUNCHES]
COMMUNICATIONS = (
    "local_sgd of 4 workers every 8 steps",
    "diloco of 4 workers every 50 steps",
    "power_sgd of rank 4 from step 100",
    "top_k 0.01 of 4 workers",
)
HARDWARE = {"3xa100": "3xa100-40", "8xa100": "8xa100-80", "fsdp2_8xa100": "8xa100-80"}
"""Launch file -> the devices that it means, where its name does not say it."""
COMMAND = re.compile(
    r"^#   accelerate launch .* scripts/(\w+)\.py \\\n#     --recipe (\w+) --per_device_train_batch_size (\d+)$", re.M
)


# ---------------------------------------------------------------------------------------------------------------------
# What is supported


def list_ways() -> Iterator[tuple[str, str, Any, Any, bool]]:
    """Yield every way to train, of a small recipe: task, title, recipe, settings, and whether `--reproducible` takes it."""
    for task, ways in WAYS.items():
        name = next(name for name in catalog_names() if name.endswith("_cpu") and load(name).task == task)
        if not ways:
            flags = {
                method.name: [f"--{field} {value}" for field, value in method.changes.items()] for method in METHODS
            }
            ways = {method: " ".join(words) for method, words in flags.items()}
        for title, words in ways.items():
            argv = ["--recipe", name, *words.split()]
            recipe, settings = run_settings.parse(argv, task, "")
            try:
                run_settings.parse([*argv, "--reproducible", "4"], task, "")
                has_bits = True
            except UsageError:
                has_bits = False
            yield task, title, recipe, settings, has_bits


def describe_launch(
    recipe: Any, settings: Any, has_bits: bool, precision: str, is_sharded: bool
) -> tuple[str, str | None]:
    """Say how far a launch is exact, and if it is refused, why.

    Args:
        recipe: what is trained.
        settings: of the run.
        has_bits: whether `--reproducible` takes it.
        precision: no, bf16 or fp16.
        is_sharded: whether weights are sharded (FSDP2).
    """
    launch = {"mixed_precision": precision, "is_sharded": is_sharded}
    refusal = find_refusal(recipe, settings, **launch)
    if refusal is not None:
        return "refused", refusal.reason
    has_formula = recipe.parts.shape is not None
    if recipe.estimates_second_moment or (has_formula and from_recipe(recipe).batch_normalization):
        return "not exact", None
    text = {"no": "exact", "bf16": "16-bit", "fp16": "16-bit, skips"}[precision]
    has_bits = has_bits and find_refusal(recipe, dataclasses.replace(settings, reproducible=4), **launch) is None
    return text + (", bits" if has_bits else ""), None


def support() -> str:
    """Make the table of task, way, precision and launcher."""
    lines, reasons = [], []
    for task, title, recipe, settings, has_bits in list_ways():
        cells = []
        for precision, is_sharded in LAUNCHES:
            text, reason = describe_launch(recipe, settings, has_bits, precision, is_sharded)
            if reason is not None:
                reasons += [reason] * (reason not in reasons)
                text += f" {reasons.index(reason) + 1}"
            cells.append(text)
        lines.append([TITLES[task], title or "all weights", *cells])
    notes = "".join(f"{number}. {reason}\n" for number, reason in enumerate(reasons, 1))
    return f"{table(['task', 'way', *HEADS], lines)}\nRefused, and why:\n\n{notes}"


def communication() -> str:
    """Make the table of algorithms that send less, by precision and launcher."""
    lines = []
    for text in COMMUNICATIONS:
        found, cells = Algorithm.read(text), []
        for precision, is_sharded in LAUNCHES:
            refusal = find_refusal(communication=found, mixed_precision=precision, is_sharded=is_sharded)
            cells.append(
                "refused" if refusal else {"no": "another algorithm", "bf16": "another algorithm, 16-bit"}[precision]
            )
        number = "any" if found.num_workers is None else f"1 to {found.num_workers}"
        lines.append([f"`{text}`", number, *cells])
    for name in ("bf16", "fp16"):
        launches = (find_refusal(reduce_dtype=name, mixed_precision=p, is_sharded=s) for p, s in LAUNCHES)
        lines.append(
            [f"`--reduce_dtype {name}`", "any, other rounding", *("refused" if r else "not exact" for r in launches)]
        )
    return table(["communication", "processes", *HEADS], lines)


def rules() -> str:
    """Make the table of what excludes what; values that a message names are dots."""
    # No backquotes: what stands in them is taken for a whole command
    texts = (
        (re.sub(r"{[^}]*}", "...", text).replace("`", '"') for text in (rule.reason, rule.remedy)) for rule in RULES
    )
    return table("refused | instead", [[reason, remedy or "-"] for reason, remedy in texts])


# ---------------------------------------------------------------------------------------------------------------------
# Hardware, recipes


def list_launch_files() -> Iterator[tuple[str, Placement]]:
    """Yield every launch file for GPUs, and the placement of the command at its head."""
    for path in sorted((ROOT / "accelerate_configs").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        if yaml.safe_load(text).get("use_cpu"):
            continue
        _, recipe, b = COMMAND.search(text).groups()
        hardware, is_sharded = parse(HARDWARE.get(path.stem, path.stem)), path.stem.startswith("fsdp2")
        yield (
            path.name,
            place(from_recipe(load(recipe)), hardware, per_device_train_batch_size=int(b), sharded=is_sharded),
        )


def launch_files() -> str:
    """Make the table of launch files: what fits, how long it takes."""
    lines = []
    for name, placement in list_launch_files():
        (command,) = COMMAND.findall((ROOT / "accelerate_configs" / name).read_text(encoding="utf-8"))
        seconds, n, layout = placement.seconds_to_end, placement.hardware.num_processes, placement.layout
        lines.append(
            [
                f"`{name}`",
                placement.hardware.device.description,
                f"`{command[1]}`",
                f"{layout.per_device_train_batch_size} x {n} x {layout.gradient_accumulation_steps}",
                f"{placement.needed_bytes / 1e9:.1f} of {placement.hardware.device.memory_bytes / 1e9:.1f}",
                f"{placement.time.samples_per_second(layout.global_batch_size):,.0f}",
                "-" if seconds is None else format_seconds(seconds),
                "-" if seconds is None else f"{seconds / 3600 * n:,.0f}",
            ]
        )
    heads = "launch file | device | recipe | b x N x k | GB of one device | samples/s | to the end | device-hours"
    return table(heads, lines)


def make_catalog(task: str) -> str:
    """Make the table of a task's recipes."""
    lines = []
    for name in catalog_names():
        recipe = load(name)
        if recipe.task == task:
            batch = f"{recipe.description} Global batch {recipe.global_batch_size:,}."
            lines.append([f"`{name}`", *(" ".join(text.split()) for text in (batch, recipe.source, recipe.expect))])
    return table("recipe | trains | numbers from | to expect", lines)


assert set(TITLES) == set(WAYS) == set(TASKS)
