"""Is a step of fine-tuning a language model the same however it is cut: four shapes, all objectives, full and LoRA?

    make bench NAME=chat_grid
    python benchmarks/chat_grid.py --only cells --shapes llama --dtypes float64     # a part; other parts stay as they were
    python benchmarks/chat_grid.py --resume                                         # what is missing of a run that was ended

- Cells: tiny models of four architectures, all weights or LoRA with dropout drawn by sample, take 10 steps of each objective in
  six layouts of up to 3 processes, by caps of samples and of tokens. Epochs end in a smaller step. Losses and gradient norms of
  each step, the average of gradients (AdamW's first moment) and parameters at the end, beside those of whole batches. One
  process computes the cells of all processes, cut by the code that a run cuts with, and adds their gradients up: what an
  all-reduce does, without its wait.
- Processes: the program itself on 2 and 3 processes over gloo, sharded over 2 (FSDP2), and moved from 2 to 3 after half of the
  steps, for a part of the grid.

Models of transformers but GPT-2 normalise in float32 in whatever type they are. In models of float64 that shows where gradients
of weights are added up so (Gemma: 1e-8 in every cut), and where losses are multiplied by a number of processes that is no power
of two, so that other bits are rounded away (1e-8 on three). There float32 is replaced by float64: in cells of shapes of
`NARROW`, and in all processes.
"""

import contextlib
import copy
import io
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import harness
import torch
from common import all_metrics, launch_environment, samples_of_steps, tiny_argv, write_corpus
from compare import parameters, relative
from forked import Server
from reproducible import compare_tensors
from wide import Wide

from samestep.cut.layout import solve_layout
from samestep.cut.order import Order
from samestep.data import conversations
from samestep.data.steps import Steps
from samestep.models.causal_lm import CausalLmSums
from samestep.printing import format_count
from samestep.recipe import run_settings
from samestep.step import losses, noise, optim

Result = tuple[list[tuple[float, float]], dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""Loss and gradient norm of each step; and by name the average of gradients at the end, and the trained parameters."""

PROGRAM, TASK = "finetune_causal_lm", "causal_lm_finetuning"
SHAPES = {
    "llama": "",
    "qwen3": "--architecture qwen3",
    "gemma3": "--architecture gemma3_text",
    "gpt2": "--architecture gpt2 --num_key_value_heads none",
}
TUNED = {"full": "", "lora": "--lora_rank 4 --lora_alpha 8 --lora_dropout 0.1"}
PAIRS = "--dataset_name builtin/drawn_pairs --train_on completions --objective"
OBJECTIVES = {
    "sft by token": "",
    "sft by sample": "--loss_weighting sample",
    "dpo": f"{PAIRS} dpo",
    "dpo + sft": f"{PAIRS} dpo --sft_loss_weight 0.2",
    "orpo": f"{PAIRS} orpo",
    "simpo": f"{PAIRS} simpo --preference_beta 2",
    "reward": f"{PAIRS} reward",
}
# Processes, cap of samples, whether tokens are capped at the longest sample's.
LAYOUTS = ((1, 2, False), (1, 5, True), (2, 5, False), (2, 2, False), (3, 2, False), (3, 5, True))
NARROW = ("gemma3",)
"""Shapes whose normalisations add up gradients in float32 in models of float64, too: there they are made to use float64."""
BATCH, NUM_SAMPLES, NUM_STEPS = 5, 12, 10  # steps of 5, 5 and 2 samples
BOUNDS = {"float64": 1e-12, "float32": 1e-5}
ERRORS = ("loss", "grad_norm", "gradient", "parameters")
"""What the bounds are for."""
SIZE = (
    f"--global_batch_size {BATCH} --num_train_samples {NUM_SAMPLES} --num_validation_samples 2 --epoch_end keep "
    f"--max_train_steps {NUM_STEPS} --num_generations 0"
)


# ---------------------------------------------------------------------------------------------------------------------
# Cells


class Training:
    """Ten steps of a recipe in any layout, in one process.

    Args:
        flags: of the program.
        dtype: of the weights.
        is_wide: whether what the model converts to float32 is computed in float64.
    """

    def __init__(self, flags: str, dtype: str, is_wide: bool):
        argv = [word for word in tiny_argv(PROGRAM, Path("corpus"), "unused", f"{SIZE} {flags}") if word]
        self.recipe, settings = run_settings.parse(argv, TASK, "")
        self.dtype, self.is_wide = getattr(torch, dtype), is_wide
        self.train, _ = conversations.build(self.recipe)
        torch.manual_seed(self.recipe.seed)
        self.model = CausalLmSums.from_recipe(self.recipe, self.train).to(self.dtype).train()
        self.noise = noise.noise_by_sample(self.model, self.recipe.seed)  # copies of the model share it
        next(iter(self.model.kernel_candidates(torch.device("cpu"), "no", settings).values()))()
        if self.recipe.objective == "dpo":
            self.train.reference = self._compute_reference()

    def _wide(self) -> contextlib.AbstractContextManager:
        return Wide() if self.is_wide else contextlib.nullcontext()

    @torch.no_grad()
    def _compute_reference(self) -> Any:
        model = copy.deepcopy(self.model).eval()
        batches = [self.train.collate([self.train.draw(0, place)]) for place in range(len(self.train))]
        for batch in batches:
            batch.pop("counts")
        with self._wide():
            return (
                torch.stack([model.sequence_log_probabilities(**batch) for batch in batches]).to(torch.float32).numpy()
            )

    def run(self, num_processes: int, cap: int, caps_tokens: bool) -> Result:
        """Train from the first weights on."""
        recipe, model = self.recipe, copy.deepcopy(self.model)
        optimizer = optim.from_recipe(model, recipe)
        order = Order(len(self.train), recipe.global_batch_size, recipe.seed, recipe.epoch_end)
        schedule = recipe.schedule(NUM_STEPS, float(order.steps_per_epoch))
        layout = solve_layout(
            num_processes=num_processes, global_batch_size=recipe.global_batch_size, per_device_train_batch_size=cap
        )
        max_tokens = self.train.max_length if caps_tokens else None
        cuts = [
            Steps(self.train, order, layout, process_index=index, max_tokens=max_tokens)
            for index in range(num_processes)
        ]
        weights = torch.tensor(list(recipe.loss_weights.values()), dtype=self.dtype)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        curve = []
        for number in range(NUM_STEPS):
            shares = [cut[number] for cut in cuts]
            counts = torch.stack([share.counts for share in shares]).sum(0).clamp(min=1)
            loss = 0.0
            with self._wide():
                for share in shares:
                    for batch, samples in zip(share.micro_batches, share.samples, strict=True):
                        self.noise.set_samples(samples)
                        part = losses.weighted_loss(model(**batch)[0], counts, weights)
                        part.backward()
                        loss += part.item()
            norm = torch.nn.utils.clip_grad_norm_(trained.values(), recipe.max_grad_norm).item()
            for group in optimizer.param_groups:
                group["lr"] = schedule(number) * group["lr_scale"]
            optimizer.step()
            optimizer.zero_grad()
            curve.append((loss, norm))
        gradient = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in trained.items()}
        return curve, gradient, {name: parameter.detach() for name, parameter in trained.items()}


def compare_curves(ours: list[tuple[float, ...]], theirs: list[tuple[float, ...]], place: int) -> float:
    """Find the largest relative difference of a value in two curves."""
    return max(abs(a[place] - b[place]) / abs(b[place]) for a, b in zip(ours, theirs, strict=True))


def compare_results(ours: Result, theirs: Result) -> dict[str, float]:
    """Compute relative differences: the largest of a step, or of norms over all numbers, key biases told apart."""
    errors = {"loss": compare_curves(ours[0], theirs[0], 0), "grad_norm": compare_curves(ours[0], theirs[0], 1)}
    errors["gradient"], _ = compare_tensors(ours[1], theirs[1])
    errors["parameters"], errors["key_biases"] = compare_tensors(ours[2], theirs[2])
    return errors


def measure_cells(
    shape: str, tuned: str, objective: str, dtype: str, layouts: Sequence[tuple[int, int, bool]] = LAYOUTS
) -> dict[str, Any]:
    """Compare layouts of a workload with whole batches: the largest relative differences."""
    with contextlib.redirect_stdout(io.StringIO()):
        flags = f"{SHAPES[shape]} {TUNED[tuned]} {OBJECTIVES[objective]}"
        training = Training(flags, dtype, shape in NARROW and dtype == "float64")
    whole = training.run(1, BATCH, False)
    errors = [compare_results(training.run(*layout), whole) for layout in layouts]
    row = {"shape": shape, "tuned": tuned, "objective": objective, "dtype": dtype, "layouts": len(layouts)}
    row |= {name: max(error[name] for error in errors) for name in errors[0]}
    if dtype == "float32" and find_breaks([row]):
        with contextlib.redirect_stdout(io.StringIO()):
            wide = Training(flags, "float64", True)
        row["rounding"] = compare_results(whole, wide.run(1, BATCH, False))
    return row


def find_breaks(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """Find the workloads that break the bound of their type, and by which error."""
    return [(row, name) for row in rows for name in ERRORS if not row[name] <= BOUNDS[row["dtype"]]]


def describe_break(row: dict[str, Any], name: str) -> str:
    """Say how far a workload is off, and in float32 how far whole batches are from those in float64."""
    text = f"{row['shape']}, {row['tuned']}, {row['objective']}, {row['dtype']}: {name} {row[name]:.1e}"
    return text + (f" (float32 itself {row['rounding'][name]:.1e})" if "rounding" in row else "")


# ---------------------------------------------------------------------------------------------------------------------
# Processes

# Name -> shape, and flags; all in float64.
REAL = {
    "qwen3, lora, sft by sample": ("qwen3", f"{TUNED['lora']} {OBJECTIVES['sft by sample']}"),
    "gemma3, full, dpo + sft": ("gemma3", OBJECTIVES["dpo + sft"]),
    "gpt2, lora, sft by token": ("gpt2", TUNED["lora"]),
    "llama, full, orpo": ("llama", OBJECTIVES["orpo"]),
    "llama, lora, reward": ("llama", f"{TUNED['lora']} {OBJECTIVES['reward']}"),
    "qwen3, full, simpo": ("qwen3", OBJECTIVES["simpo"]),
    "llama, full, a mixture": (
        "llama",
        "--dataset_name builtin/drawn_chats builtin/doctests --mixture_weights 0.5 0.01",
    ),
}
CAP, STOP, RESUME = "--per_device_train_batch_size 2", "--stop_after_step 5", "--resume_from_checkpoint latest"
WHOLE = "whole"
# Name -> trainings in one folder, one after the other: number of processes, launch file, flags.
WAYS = {
    WHOLE: [(1, "2xcpu", f"--per_device_train_batch_size {BATCH}")],
    "2 processes": [(2, "2xcpu", CAP)],
    "3 processes": [(3, "2xcpu", CAP)],
    "moved from 2 to 3": [(2, "2xcpu", f"{CAP} {STOP}"), (3, "2xcpu", f"{CAP} {RESUME}")],
    "FSDP2 on 2": [(2, "fsdp2_2xcpu", CAP)],
    "moved from FSDP2 on 2 to 1": [(2, "fsdp2_2xcpu", f"{CAP} {STOP}"), (1, "2xcpu", f"{CAP} {RESUME}")],
}


def measure_processes(work: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Train the workloads `names` in all ways; compare each with whole batches on one process."""
    corpus, rows = write_corpus(work), []
    with Server("run_wide", libraries=("run_layouts",), is_cpu=False) as server:
        for way, trainings in WAYS.items():
            for num_processes, config, flags in trainings:
                print(f"{way}: {format_count(num_processes, 'process')}", file=sys.stderr, flush=True)
                environment = launch_environment(
                    ROOT / "accelerate_configs" / f"{config}.yaml", "--num_processes", str(num_processes)
                )
                calls = []
                for name in names:
                    shape, more = REAL[name]
                    words = f"{SIZE} {SHAPES[shape]} {more} --dtype float64 --record_samples {flags}"
                    calls.append([PROGRAM, *tiny_argv(PROGRAM, corpus, work / way / name, words)])
                (work / way).mkdir(exist_ok=True)
                words = [str(work / way), json.dumps(calls)]
                server.run(words, num_processes, timeout=1800, environment=environment, can_repeat=False)
        for name in names:
            for way in WAYS:
                if way == WHOLE:
                    continue
                pair = [work / way / name, work / WHOLE / name]
                curves = [
                    [(line["loss"], line["grad_norm"]) for line in all_metrics(folder) if "loss" in line]
                    for folder in pair
                ]
                assert len(curves[0]) == NUM_STEPS
                assert samples_of_steps(pair[0]) == samples_of_steps(pair[1])
                row = {"workload": name, "way": way}
                row |= {"loss": compare_curves(*curves, 0), "grad_norm": compare_curves(*curves, 1)}
                rows.append(row | {"parameters": relative(*map(parameters, pair))})
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Results


def markdown(results: dict[str, Any]) -> str:
    """Make results/chat_grid.md."""
    body = ""
    if rows := results["cells"]:
        num_runs = sum(row["layouts"] for row in rows)
        num_cases = len(SHAPES) * len(BOUNDS) * len(TUNED) * len(OBJECTIVES)
        breaks = find_breaks(rows)
        verdict = "holds in all of them"
        if breaks:
            verdict = (
                f"holds in all but these, in brackets how far whole batches in float32 are from those in float64: "
                f"{'; '.join(describe_break(*each) for each in breaks)}"
            )
        body += (
            f"{len(rows)} of {num_cases} workloads, in {len(LAYOUTS)} layouts each: {num_runs} trainings of {NUM_STEPS} steps "
            "beside those of whole batches. Shown are the largest relative differences: of any step's loss and gradient norm, "
            "and, by norms over all numbers, of the average of gradients (AdamW's first moment) and of the parameters at the "
            f"end. The rule, at most {BOUNDS['float32']:g} in float32 and {BOUNDS['float64']:g} in float64, {verdict}.\n\n"
        )
        names = [*ERRORS, "key_biases"]
        heads = "objectives | loss | gradient norm | gradient | parameters | key biases | bound"
        groups = [
            (
                [shape, tuned, dtype],
                bound,
                [row for row in rows if [row["shape"], row["tuned"], row["dtype"]] == [shape, tuned, dtype]],
            )
            for shape in SHAPES
            for tuned in TUNED
            for dtype, bound in BOUNDS.items()
        ]
        lines = [
            [*words, len(part), *(f"{max(row[name] for row in part):.1e}" for name in names), f"{bound:g}"]
            for words, bound, part in groups
            if part
        ]
        body += harness.table(f"shape | tuned | type | {heads}", lines)
        body += (
            "\nKey biases, which GPT-2 has when all weights are trained: their part of the parameters' difference, which is "
            "not in the column before. Attention does not depend on them; their gradient is rounding, which AdamW divides by "
            "its own size.\n\nThe same by objective, over all shapes.\n\n"
        )
        lines = [
            [objective, dtype, *(f"{max(row[name] for row in part):.1e}" for name in ERRORS)]
            for objective in OBJECTIVES
            for dtype in BOUNDS
            if (part := [row for row in rows if (row["objective"], row["dtype"]) == (objective, dtype)])
        ]
        body += harness.table("objective | type | loss | gradient norm | gradient | parameters", lines)
        body += (
            f"\nIn models of {', '.join(NARROW)} of float64 what transformers computes in float32 is computed in float64: its "
            "normalisations add up the gradients of their weights in float32, so that else another cut's losses differ by "
            "1e-8.\n"
        )
    if rows := results["processes"]:
        body += (
            f"\nThe program itself, float64, {NUM_STEPS} steps of at most {BATCH} samples in micro-batches of at most 2, "
            "beside whole batches on one process. Every step had the same samples. What transformers computes in float32 is "
            "computed in float64: else losses differ by 1e-8 on three processes, where they are multiplied by 3 before the "
            "backward, which float32 rounds to other bits (on two, four or eight it does not).\n\n"
        )
        lines = [
            [row["workload"], row["way"], *(f"{row[name]:.1e}" for name in ("loss", "grad_norm", "parameters"))]
            for row in rows
        ]
        body += harness.table("workload | processes | loss | gradient norm | parameters", lines)
    return harness.page("Chat models in every cut", "chat_grid.py", results["about"], body)


KEY = ("shape", "dtype", "tuned", "objective")
"""What names a row of cells."""


def main() -> None:
    parser = harness.flags("chat_grid", __doc__, only=["cells", "processes"])
    for name, choices in (("shapes", SHAPES), ("dtypes", BOUNDS), ("tuned", TUNED)):
        parser.add_argument(f"--{name}", nargs="+", choices=list(choices), default=list(choices))
    parser.add_argument("--resume", action="store_true", help="measure only what is missing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    packages = ("torch", "transformers", "accelerate", "peft")
    about = harness.about("make bench NAME=chat_grid", packages, threads=1)
    results: dict[str, Any] = {"about": about, "cells": [], "processes": []}
    old = harness.read(arguments.output)
    if old and [old["about"][name] for name in ("versions", "python")] == [about["versions"], about["python"]]:
        results |= {name: old[name] for name in ("cells", "processes")}
    if "cells" in arguments.only:
        cases = list(
            itertools.product(*(getattr(arguments, name) for name in ("shapes", "dtypes", "tuned")), OBJECTIVES)
        )
        known = [tuple(row[name] for name in KEY) for row in results["cells"]]
        for case in [case for case in cases if not (arguments.resume and case in known)]:
            row = measure_cells(**dict(zip(KEY, case, strict=True)))
            print(row, file=sys.stderr, flush=True)
            others = [other for other in results["cells"] if tuple(other[name] for name in KEY) != case]
            results["cells"] = [*others, row]
            harness.write(arguments.output, results, markdown(results), is_last=False)
    if "processes" in arguments.only:
        known = {row["workload"] for row in results["processes"]} if arguments.resume else set()
        names = [name for name in REAL if REAL[name][0] in arguments.shapes and name not in known]
        with tempfile.TemporaryDirectory() as folder:
            rows = measure_processes(Path(folder), names) if names else []
        others = [row for row in results["processes"] if row["workload"] not in names]
        results["processes"] = sorted([*others, *rows], key=lambda row: list(REAL).index(row["workload"]))
    harness.write(arguments.output, results, markdown(results))


if __name__ == "__main__":
    main()
