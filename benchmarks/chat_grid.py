"""Is a step of fine-tuning a language model the same however it is cut: four shapes, all objectives, full and LoRA?

    make bench-chat-grid           # about 15 minutes on 2 idle cores
    python benchmarks/chat_grid.py --only cells --shapes llama

- Cells: tiny models of four architectures, all weights or LoRA with dropout drawn by sample, take 10 steps of each objective in
  six layouts of up to 3 processes, by caps of samples and of tokens. Epochs end in a smaller step. Losses and gradient norms of
  each step, and parameters at the end, beside those of whole batches. One process computes the cells of all processes, cut by
  the code that a run cuts with, and adds their gradients up: what an all-reduce does, without its wait.
- Processes: the program itself on 2 and 3 processes over gloo, and resumed on another number of them, for a part of the grid.
"""

import contextlib
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
from common import all_metrics, launch_environment, tiny_argv, write_corpus
from compare import parameters, relative
from forked import Server
from wide import Wide

from samestep.cut.layout import solve_layout
from samestep.cut.order import Order
from samestep.data import conversations
from samestep.data.steps import Steps
from samestep.models.causal_lm import CausalLmSums
from samestep.recipe import run_settings
from samestep.step import losses, noise, optim

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
SIZE = (
    f"--global_batch_size {BATCH} --num_train_samples {NUM_SAMPLES} --num_validation_samples 4 --epoch_end keep "
    f"--max_train_steps {NUM_STEPS}"
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
        self.recipe, self.settings = run_settings.parse(argv, TASK, "")
        self.dtype, self.is_wide = getattr(torch, dtype), is_wide
        self.train, _ = conversations.build(self.recipe)
        if self.recipe.objective == "dpo":
            self.train.reference = self._compute_reference()

    def _build(self) -> tuple[CausalLmSums, Any]:
        torch.manual_seed(self.recipe.seed)
        model = CausalLmSums.from_recipe(self.recipe, self.train).to(self.dtype)
        by_sample = noise.noise_by_sample(model, self.recipe.seed)
        next(iter(model.kernel_candidates(torch.device("cpu"), "no", self.settings).values()))()
        return model.train(), by_sample

    @torch.no_grad()
    def _compute_reference(self) -> Any:
        model, _ = self._build()
        batches = [self.train.collate([self.train.draw(0, place)]) for place in range(len(self.train))]
        for batch in batches:
            batch.pop("counts")
        return torch.stack([model.eval().sequence_log_probabilities(**batch) for batch in batches]).float().numpy()

    def run(self, num_processes: int, cap: int, caps_tokens: bool) -> tuple[list[tuple[float, float]], torch.Tensor]:
        """Train; return loss and gradient norm of each step, and the trained parameters."""
        model, by_sample = self._build()
        with Wide() if self.is_wide else contextlib.nullcontext():
            return self._train(model, by_sample, num_processes, cap, caps_tokens)

    def _train(
        self, model: CausalLmSums, by_sample: noise.Noise, num_processes: int, cap: int, caps_tokens: bool
    ) -> tuple[list[tuple[float, float]], torch.Tensor]:
        recipe = self.recipe
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
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        curve = []
        for number in range(NUM_STEPS):
            shares = [cut[number] for cut in cuts]
            counts = torch.stack([share.counts for share in shares]).sum(0).clamp(min=1)
            loss = 0.0
            for share in shares:
                for batch, samples in zip(share.micro_batches, share.samples, strict=True):
                    by_sample.set_samples(samples)
                    part = losses.weighted_loss(model(**batch)[0], counts, weights)
                    part.backward()
                    loss += part.item()
            norm = torch.nn.utils.clip_grad_norm_(trained, recipe.max_grad_norm).item()
            for group in optimizer.param_groups:
                group["lr"] = schedule(number) * group["lr_scale"]
            optimizer.step()
            optimizer.zero_grad()
            curve.append((loss, norm))
        return curve, torch.cat([parameter.detach().flatten() for parameter in trained])


def compare_curves(ours: list[tuple[float, ...]], theirs: list[tuple[float, ...]], place: int) -> float:
    """Find the largest relative difference of a value in two curves."""
    return max(abs(a[place] - b[place]) / abs(b[place]) for a, b in zip(ours, theirs, strict=True))


def measure_cells(
    shape: str, tuned: str, objective: str, dtype: str, layouts: Sequence[tuple[int, int, bool]] = LAYOUTS
) -> dict[str, Any]:
    """Compare layouts of a workload with whole batches: the largest relative differences."""
    with contextlib.redirect_stdout(io.StringIO()):
        flags, is_wide = (
            f"{SHAPES[shape]} {TUNED[tuned]} {OBJECTIVES[objective]}",
            shape in NARROW and dtype == "float64",
        )
        training = Training(flags, dtype, is_wide)
    curve, expected = training.run(1, BATCH, False)
    found = [training.run(*layout) for layout in layouts]
    return {
        **{"shape": shape, "tuned": tuned, "objective": objective, "dtype": dtype, "layouts": len(layouts)},
        **{"loss": max(compare_curves(ours, curve, 0) for ours, _ in found)},
        **{"grad_norm": max(compare_curves(ours, curve, 1) for ours, _ in found)},
        **{"parameters": max(relative(ours, expected) for _, ours in found)},
    }


# ---------------------------------------------------------------------------------------------------------------------
# Processes

# Name -> flags; all in float64, micro-batches of at most 2 samples.
REAL = {
    "qwen3, lora, sft by sample": f"{SHAPES['qwen3']} {TUNED['lora']} {OBJECTIVES['sft by sample']}",
    "gemma3, full, dpo + sft": f"{SHAPES['gemma3']} {OBJECTIVES['dpo + sft']}",
    "gpt2, lora, sft by token": f"{SHAPES['gpt2']} {TUNED['lora']}",
    "llama, full, orpo": OBJECTIVES["orpo"],
}


def measure_processes(work: Path) -> list[dict[str, Any]]:
    """Train on 1, 2 and 3 processes, and moved from 2 to 3 after step 5; compare each with one process's whole batches."""
    corpus, rows = write_corpus(work), []
    with Server("run_layouts", libraries=(), is_cpu=False) as server:

        def train(folder: str, num_processes: int, flags: str) -> None:
            calls = [
                [
                    PROGRAM,
                    *tiny_argv(PROGRAM, corpus, work / folder / name, f"{SIZE} {REAL[name]} --dtype float64 {flags}"),
                ]
                for name in REAL
            ]
            environment = launch_environment(
                ROOT / "accelerate_configs" / "2xcpu.yaml", "--num_processes", str(num_processes)
            )
            (work / folder).mkdir(exist_ok=True)
            server.run([str(work / folder), json.dumps(calls)], num_processes, timeout=1800, environment=environment)
            print(f"{folder}: {num_processes} process(es)", file=sys.stderr, flush=True)

        cap = "--per_device_train_batch_size 2"
        train("whole", 1, f"--per_device_train_batch_size {BATCH}")
        train("2 processes", 2, cap)
        train("3 processes", 3, cap)
        train("moved from 2 to 3", 2, f"{cap} --stop_after_step 5")
        train("moved from 2 to 3", 3, f"{cap} --resume_from_checkpoint latest")
        for name in REAL:
            whole = work / "whole" / name
            for way in ("2 processes", "3 processes", "moved from 2 to 3"):
                curves = [
                    [(line["loss"], line["grad_norm"]) for line in all_metrics(folder) if "loss" in line]
                    for folder in (work / way / name, whole)
                ]
                rows.append(
                    {
                        **{"workload": name, "way": way, "loss": compare_curves(*curves, 0)},
                        **{"grad_norm": compare_curves(*curves, 1)},
                        **{"parameters": relative(parameters(work / way / name), parameters(whole))},
                    }
                )
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Results


def markdown(results: dict[str, Any]) -> str:
    """Make results/chat_grid.md."""
    body = ""
    if rows := results["cells"]:
        num_runs = sum(row["layouts"] for row in rows)
        num_cases = len(SHAPES) * len(BOUNDS) * len(TUNED) * len(OBJECTIVES)
        body += (
            f"{len(rows)} of {num_cases} workloads, in {len(LAYOUTS)} layouts each: {num_runs} trainings of {NUM_STEPS} steps "
            "beside those of whole batches: the largest relative difference of any step's loss, any step's gradient norm, and "
            "of the parameters at the end.\n\n"
        )
        lines = []
        for shape in SHAPES:
            for tuned in TUNED:
                for dtype, bound in BOUNDS.items():
                    part = [row for row in rows if (row["shape"], row["tuned"], row["dtype"]) == (shape, tuned, dtype)]
                    if part:
                        worst = [max(row[name] for row in part) for name in ("loss", "grad_norm", "parameters")]
                        holds = "yes" if max(worst) <= bound else "no"
                        lines.append(
                            [shape, tuned, dtype, len(part), *(f"{value:.1e}" for value in worst), f"{bound:g}", holds]
                        )
        heads = "shape | tuned | dtype | objectives | loss | gradient norm | parameters | bound | holds"
        body += harness.table(heads, lines)
        body += "\nThe same by objective, over all shapes.\n\n"
        lines = [
            [
                objective,
                dtype,
                *(f"{max(row[name] for row in part):.1e}" for name in ("loss", "grad_norm", "parameters")),
            ]
            for objective in OBJECTIVES
            for dtype in BOUNDS
            if (part := [row for row in rows if (row["objective"], row["dtype"]) == (objective, dtype)])
        ]
        body += harness.table("objective | dtype | loss | gradient norm | parameters", lines)
    if rows := results["processes"]:
        body += (
            f"\nThe program itself, float64, {NUM_STEPS} steps of at most {BATCH} samples in micro-batches of at most 2, "
            "beside whole batches on one process.\n\n"
        )
        lines = [
            [row["workload"], row["way"], *(f"{row[name]:.1e}" for name in ("loss", "grad_norm", "parameters"))]
            for row in rows
        ]
        body += harness.table("workload | processes | loss | gradient norm | parameters", lines)
    return harness.page("Chat models in every cut", "chat_grid.py", results["about"], body)


def main() -> None:
    parser = harness.flags("chat_grid", __doc__, only=["cells", "processes"])
    for name, choices in (("shapes", SHAPES), ("dtypes", BOUNDS), ("tuned", TUNED)):
        parser.add_argument(f"--{name}", nargs="+", choices=list(choices), default=list(choices))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    packages = ("torch", "transformers", "accelerate", "peft")
    about = harness.about("make bench-chat-grid", packages, threads=1)
    results: dict[str, Any] = {"about": about, "cells": [], "processes": []}
    path = arguments.output.with_suffix(".json")
    if path.exists():  # parts that are not measured now stay
        results |= {name: json.loads(path.read_text())[name] for name in ("cells", "processes")}
    if "cells" in arguments.only:
        for case in itertools.product(arguments.shapes, arguments.dtypes, arguments.tuned, OBJECTIVES):
            shape, dtype, tuned, objective = case
            row = measure_cells(shape, tuned, objective, dtype)
            print(row, file=sys.stderr, flush=True)
            names = ("shape", "dtype", "tuned", "objective")
            others = [other for other in results["cells"] if tuple(other[name] for name in names) != case]
            results["cells"] = [*others, row]
            harness.write(arguments.output, results, markdown(results), is_last=False)
    if "processes" in arguments.only:
        with tempfile.TemporaryDirectory() as folder:
            results["processes"] = measure_processes(Path(folder))
    harness.write(arguments.output, results, markdown(results))


if __name__ == "__main__":
    main()
