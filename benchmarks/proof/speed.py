"""Part 5: steps on one NVIDIA GPU: how fast, how near to its products of matrices, and whether they are the exact ones.

Needs no data. Text is drawn: token ids by Zipf's law, lengths of samples by lengths.json, which real sentence pairs have.
Images are noise. The models are those of the scripts and the catalog, without dropout but where a variant says so. Each is
computed by each kernel that its script chooses from, plain and compiled.

A step is the scripts': micro-batches copied from pinned memory, sums divided by the counts of the whole step, Accelerate's
backward, clipping, a fused optimizer that leaves out what is not finite; nothing in it waits for the device (`host_waits`,
counted by torch's sync debug mode). Micro-batches hold as many tokens as are good for the device. Seconds are medians between
CUDA events at the ends of steps, read when all are done. Work is counted for real tokens only (`count_flops`), and shown as
part of what a large bfloat16 product reaches on the device.

Every variant is checked before it is timed, on a few layers of full width and the samples of a step:

- cut: the gradient of the step in several micro-batches, in float32 (images: float64, with batch statistics of the whole step),
  beside the reference's in one micro-batch: the same model, sdpa by its math kernel. At most 1e-5 (images: 1e-9) of its norm.
  Where a kernel is for 16 bits only, as torch's of variable length are, the model's first kernel takes its place here.
- bfloat16: the variant's own kernels in several micro-batches (images: one), at most 4 times as far from the float32 gradient
  as the reference's in bfloat16.
- control: two faults, which the first check must find: k is not undone; each micro-batch divided by its own counts.

    cd benchmarks && python -m proof.speed        # makes lengths.json anew
"""

import contextlib
import functools
import gc
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import torch
import yaml
from accelerate import Accelerator
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from proof.speed_cases import (
    LENGTHS,
    REFERENCE,
    Case,
    Step,
    Variant,
    build,
    cases,
    draw,
    make_recipe,
    make_step,
    variants,
)
from proof.tasks import ROOT, Task, free, line, verdict
from samestep.contrib import whole_step
from samestep.data.steps import to_device
from samestep.errors import RunError
from samestep.recipe.catalog import load
from samestep.recipe.recipe import Recipe
from samestep.step import accumulate, losses, optim
from stepplan import hardware, transformer

PUBLISHED = ROOT / "benchmarks" / "published.yaml"
PRODUCTS = "products of matrices"
"""Name of the row with what a large product reaches."""
TITLE = "Speed of a step"
ABOUT = """\
Of products: what is done for real tokens, as a part of what a large bfloat16 product reaches; BERT's last layer and
GPT-2's attention leave out what is not needed. Of published numbers: by the formula of the whole model, as a part of
what stepplan/devices/ says of the device. In bold the fastest exact variant of each case, beside published numbers per
device (benchmarks/published.yaml; of several devices one's share; tokens there may be padding). No dropout, which the
published trainings of BERT have: its cost is in the second table.
"""
WINDOW = 4.0  # seconds that are timed, about
STEPS = (3, 20)  # of a window: at least, at most
PRODUCT = 8192  # m = n = k of the large product
EXACT = {"bert": 1e-5, "gpt2": 1e-5, "resnet": 1e-9}
ROUNDING = 4
FAULTS = ("k is not undone", "each micro-batch by its own counts")
CUT = 3  # micro-batches of a step that is checked


# ---------------------------------------------------------------------------------------------------------------------
# A step


def add_gradients(
    accelerator: Accelerator,
    model: Callable[..., tuple[torch.Tensor, object]],
    step: Step,
    weights: torch.Tensor,
    fault: str | None = None,
    correction: Callable[[], torch.Tensor | float] = float,
) -> torch.Tensor:
    """Add up the step's gradient over its micro-batches, as the scripts do; its mean losses [terms], on the device.

    Args:
        weights: of the loss, [terms].
        fault: one of FAULTS.
        correction: of batch normalisation over the whole step; 0 unless that is checked.
    """
    sums, counts = [], accumulate.total_counts(accelerator, torch.stack(step.counts).sum(0))
    for micro_batch, micro_counts in zip(
        accumulate.iterate_micro_batches(accelerator, step.micro_batches), step.counts, strict=True
    ):
        with accelerator.accumulate(model):
            micro_sums, _ = model(**to_device(micro_batch, accelerator.device))
            divisors = micro_counts.to(accelerator.device) if fault == FAULTS[1] else counts
            loss = losses.weighted_loss(micro_sums, divisors, weights) + correction()
            accelerator.backward(loss * (1 if fault else accumulate.loss_scale(accelerator)))
            sums.append(micro_sums.detach())
    return torch.stack(sums).sum(0) / counts


def take_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Step,
    recipe: Recipe,
    number: int,
) -> torch.Tensor:
    """Take an optimizer step as the scripts do; its mean losses [terms], on the device."""
    accumulate.seed_noise(accelerator, recipe.seed, number)
    mean_losses = add_gradients(accelerator, model, step, loss_weights(recipe, accelerator.device))
    grad_norm = accumulate.clip(accelerator, list(model.parameters()), recipe.max_grad_norm)
    optimizer.optimizer.found_inf = (~grad_norm.isfinite()).float()
    optimizer.step()
    optimizer.zero_grad()
    return mean_losses


@functools.cache
def loss_weights(recipe: Recipe, device: torch.device) -> torch.Tensor:
    """Make the weights of the terms of the recipe's loss."""
    return torch.tensor(list(recipe.loss_weights.values()), device=device)


# ---------------------------------------------------------------------------------------------------------------------
# Is it exact?


def gradient(
    accelerator: Accelerator,
    case: Case,
    variant: Variant,
    samples: list,
    *,
    k: int,
    dtype: torch.dtype,
    fault: str | None = None,
) -> torch.Tensor:
    """Compute the gradient [parameters], on the host, of one step on a few layers, in k micro-batches; bfloat16 means autocast.

    Args:
        fault: one of FAULTS.
    """
    device, half = accelerator.device, dtype == torch.bfloat16
    model = build(case, variant, device, few=True, mixed_precision="bf16" if half else "no")
    model = model if half else model.to(dtype)
    step = make_step(case, samples, device, max_samples=-(-len(samples) // k))
    weights = loss_weights(make_recipe(case), device)
    counts = torch.stack(step.counts).sum(0).to(device)

    def call(**micro_batch: torch.Tensor) -> tuple[torch.Tensor, object]:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            return model(**micro_batch)

    def compute_loss(micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return losses.weighted_loss(call(**to_device(micro_batch, device))[0], counts, weights)

    whole = whole_step.WholeStep(model if case.kind == "resnet" and k > 1 else nn.Identity())
    with sdpa_kernel(SDPBackend.MATH) if variant == REFERENCE else contextlib.nullcontext():
        whole.prepare(step.micro_batches, compute_loss)
        add_gradients(accelerator, call, step, weights, fault, whole.correction)
        whole.release()
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([part.flatten() for part in parts]).cpu()


def relative(gradient: torch.Tensor, true: torch.Tensor) -> float:
    """Compute |gradient - true| / |true|."""
    true = true.to(torch.promote_types(gradient.dtype, true.dtype))
    norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in (gradient - true, true)]
    return (norms[0] / norms[1]).item()


class Checks:
    """Checks whether variants of a case compute the step's gradient; what they have in common is computed once."""

    def __init__(self, accelerator: Accelerator, case: Case):
        self.case, self.gradient = case, functools.partial(gradient, accelerator, case)
        samples, images = draw(case, 0), case.kind == "resnet"
        self.samples = samples[: case.checked]
        self.bf16_samples = samples if images else self.samples  # of which bfloat16 is checked
        self.wide = torch.float64 if images else torch.float32
        self.true = self.gradient(REFERENCE, self.samples, k=1, dtype=self.wide)
        self.bf16_true = self.gradient(REFERENCE, self.bf16_samples, k=1, dtype=torch.float32) if images else self.true
        self.rounding = relative(self.gradient(REFERENCE, self.bf16_samples, k=1, dtype=torch.bfloat16), self.bf16_true)
        self.cut = functools.cache(self._cut)

    def _cut(self, variant: Variant, fault: str | None = None) -> float:
        return relative(self.gradient(variant, self.samples, k=CUT, dtype=self.wide, fault=fault), self.true)

    def __call__(self, variant: Variant) -> dict[str, Any]:
        """Compute errors, bounds, and whether all is as it should be."""
        k, bound = 1 if self.case.kind == "resnet" else CUT, EXACT[self.case.kind]
        cut = self.cut(Variant("", 0, variant.kernel))
        bf16 = relative(self.gradient(variant, self.bf16_samples, k=k, dtype=torch.bfloat16), self.bf16_true)
        controls = {fault: self.cut(REFERENCE, fault) for fault in FAULTS}  # of the loop, whatever the kernels
        return {
            "cut": cut,
            "cut_bound": bound,
            "bf16": bf16,
            "bf16_reference": self.rounding,
            "bf16_bound": ROUNDING * self.rounding,
            "controls": controls,
            "exact": cut <= bound and bf16 <= ROUNDING * self.rounding,
            "controls_found": all(error > bound for error in controls.values()),
        }


# ---------------------------------------------------------------------------------------------------------------------
# How fast is it?


class Clock:
    """Moments on the device, read afterwards; on a CPU those of the host."""

    def __init__(self, device: torch.device):
        self.on_gpu, self.moments = device.type == "cuda", []

    def tick(self) -> None:
        self.moments.append(torch.cuda.Event(enable_timing=True) if self.on_gpu else time.perf_counter())
        if self.on_gpu:
            self.moments[-1].record()

    def seconds(self) -> list[float]:
        """Read the seconds between one moment and the next. Waits for the device."""
        pairs = list(zip(self.moments, self.moments[1:], strict=False))
        if self.on_gpu:
            torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 if self.on_gpu else b - a for a, b in pairs]


def product_rate(device: torch.device, size: int, seconds: float) -> float:
    """Measure FLOP/s of a square product in bfloat16, the median of windows that take `seconds` together."""
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    count, times = 1, [0.0]
    while sum(times) < seconds:
        count, clock = 2 * count, Clock(device)
        for _ in range(8):
            clock.tick()
            for _ in range(count):
                a @ b
        times = clock.seconds()
    return 2 * size**3 * count / statistics.median(times)


def timed(accelerator: Accelerator, case: Case, variant: Variant, tokens: int) -> dict[str, Any]:
    """Measure the seconds of a step and what it does, with micro-batches of at most `tokens` tokens."""
    device, recipe = accelerator.device, make_recipe(case, dropout=variant.dropout)
    steps = [make_step(case, draw(case, seed), device, max_tokens=tokens) for seed in range(2)]
    free()
    model = build(case, variant, device, few=False)
    optimizer = optim.from_recipe(model, recipe)
    model, optimizer = accelerator.prepare(model, optimizer)
    numbers, mean_losses = iter(range(sys.maxsize)), []

    def run(count: int) -> Clock:
        clock = Clock(device)
        clock.tick()
        for number in (next(numbers) for _ in range(count)):
            data = steps[number % len(steps)]
            mean_losses.append(take_step(accelerator, model, optimizer, data, recipe, number))
            clock.tick()
        return clock

    (first,) = run(1).seconds()  # compiles, allocates, chooses kernels
    run(1)  # the other shapes
    waits = _host_waits(device, lambda: run(1))
    num_graphs = _num_graphs()
    (seconds,) = run(1).seconds()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = run(2 if case.tiny else min(max(STEPS[0], round(WINDOW / seconds)), STEPS[1])).seconds()
    loss = mean_losses[-1].sum().item()
    if not math.isfinite(loss):
        raise RunError(f"the loss is {loss}")
    median = statistics.median(times)
    names = ("samples", "tokens", "flops", "flops_done")
    return {
        "seconds_per_step": median,
        "slowest_step": max(times),
        "steps": len(times),
        **{f"{name}_per_second": statistics.mean(getattr(step, name) for step in steps) / median for name in names},
        "samples_per_step": steps[0].samples,
        "micro_steps": [len(step.micro_batches) for step in steps],
        "tokens_at_once": tokens,
        "peak_memory": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        "host_waits": waits,
        "graphs": _num_graphs(),
        "graphs_while_timed": _num_graphs() - num_graphs,
        "seconds_of_first_step": first,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "last_loss": loss,
    }


def _host_waits(device: torch.device, call: Callable[[], object]) -> int | None:
    """Count how often the host waits for the device in a call; None on a CPU."""
    if device.type != "cuda":
        call()
        return None
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in records)


def _num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


# ---------------------------------------------------------------------------------------------------------------------
# Every variant of every case, and the published numbers


def measure_variant(
    accelerator: Accelerator, case: Case, variant: Variant, checks: dict[str, Checks], measure: Callable = timed
) -> dict[str, Any]:
    """Check and time it, in smaller micro-batches if memory runs out. What goes wrong is a line in the results, and no reason
    to end.

    Args:
        checks: of cases by name; one that is not there yet is put there.
        measure: measures as `timed` does.
    """
    row, tokens = {"case": case.name, "variant": variant.name}, case.tokens
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    while True:
        try:
            if case.name not in checks:
                checks[case.name] = Checks(accelerator, case)
            if "check" not in row:
                row["check"] = checks[case.name](variant)
            row |= measure(accelerator, case, variant, tokens)
            break
        except torch.OutOfMemoryError as error:
            if tokens <= case.length:
                row["failed"] = line(error)
                break
            tokens = max(case.length, tokens // 2)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {line(error)}"
            break
        finally:
            accelerator.free_memory()
            free()
    return row


@functools.cache
def _published() -> dict:
    return yaml.safe_load(PUBLISHED.read_text())


def published(case: Case) -> list[dict[str, Any]]:
    """Find the best 16-bit number per device, and its part of what the device reaches in products, by the whole formula."""
    file, best_rows = _published(), {}
    for row in file["rows"]:
        if (row["work"], row.get("length")) not in case.published or row["mixed_precision"] == "no":
            continue
        machine, length = hardware.parse(row["hardware"]), row.get("length", 1)
        if machine.num_nodes > 1:
            continue
        shape, value = file["works"][row["work"]], row["value"] / machine.num_processes
        value /= length if row.get("unit") == "tokens" else 1
        if "flops" in shape:
            flops = float(shape["flops"])
        elif "recipe" in shape:
            flops = transformer.gpt2(load(shape["recipe"]).architecture, length).flops_per_sample
        else:
            sizes = (shape[name] for name in ("vocabulary", "hidden", "feed_forward", "layers"))
            flops = transformer.bert_flops(*sizes, length, row["num_predicted"])
        key = row["work"], machine.device.name
        if key in best_rows and best_rows[key]["samples_per_second"] >= value:
            continue
        reached = machine.device.tflops(row["mixed_precision"]) * 1e12 * machine.device.reachable
        best_rows[key] = {
            "source": row["source"],
            "work": f"{row['work']}{f', {length}' if 'length' in row else ''}",
            "hardware": row["hardware"],
            "samples_per_second": value,
            "tokens_per_second": value * length,
            "of_products": value * flops / reached,
        }
    return sorted(best_rows.values(), key=lambda row: (row["work"], -row["samples_per_second"]))


def is_good(row: dict[str, Any]) -> bool:
    """Tell whether a variant was timed, is exact, and its controls were found."""
    is_timed = "seconds_per_step" in row and row["check"]["exact"] and row["check"]["controls_found"]
    return "flops" in row or is_timed


def best(rows: list[dict], case: str) -> dict | None:
    """Find the fastest exact variant of a case, those with dropout left out: noise is another step."""
    case_rows = [row for row in rows if row.get("case") == case and is_good(row) and "dropout" not in row["variant"]]
    return max(case_rows, key=lambda row: row["samples_per_second"], default=None)


# ---------------------------------------------------------------------------------------------------------------------
# A part of benchmarks/proof_gpu.py


def list_tasks(is_tiny: bool, has_gpu: bool) -> list[Task]:
    """List what is measured, compiled variants of all cases first, so that the least is missing when time is short.

    Tiny: all variants of the first case of each kind, uncompiled ones of the others; compiled once is enough.
    """
    device, selection = torch.device("cuda" if has_gpu else "cpu"), cases(is_tiny)
    firsts = {case.kind: case.name for case in reversed(selection)}.values()
    names: dict[int, list[str]] = {}
    for case in selection:
        for variant in variants(case, device):
            if not is_tiny or case.name in firsts or not variant.compiled:
                names.setdefault(variant.turn, []).append(f"{case.name}: {variant.name}")
    return [Task("speed", (PRODUCTS,), is_alone=True)] + [
        Task("speed", tuple(items), seconds=1200, is_alone=True) for _, items in sorted(names.items())
    ]


@functools.cache
def _accelerator() -> Accelerator:
    gc.collect()
    gc.freeze()  # what is imported is no garbage, and need not be looked at between variants
    torch.backends.cudnn.allow_tf32 = False  # what is checked in float32 is float32
    torch._dynamo.config.recompile_limit = 64
    return Accelerator(mixed_precision="bf16", cpu=not torch.cuda.is_available())


CHECKS: dict[str, Checks] = {}
"""Of cases by name, in this process."""


def compute(item: str, is_tiny: bool) -> dict[str, Any]:
    """Measure what large products reach, or a variant of a case."""
    accelerator = _accelerator()
    if item == PRODUCTS:
        return {"flops": product_rate(accelerator.device, 256 if is_tiny else PRODUCT, 0.05 if is_tiny else 1.0)}
    name, _, variant_name = item.partition(": ")
    case = next(case for case in cases(is_tiny) if case.name == name)
    variant = next(variant for variant in variants(case, accelerator.device) if variant.name == variant_name)
    with torch.compiler.set_stance(force_backend="eager" if is_tiny else None):  # what is tiny needs no compiler
        return measure_variant(accelerator, case, variant, CHECKS)


# ---------------------------------------------------------------------------------------------------------------------
# What is written


def markdown(rows: dict[str, dict]) -> str:
    rate = rows.get(PRODUCTS, {}).get("flops", math.nan)
    variants = [row for item, row in rows.items() if item != PRODUCTS]
    comparison = []
    for case in {row["case"]: None for row in variants if "case" in row}:
        fastest = best(variants, case)
        nothing = ["nothing exact was timed", *[""] * 5]
        comparison.append(
            [f"**{case}**", *([fastest["variant"], "here", *_speed(fastest, rate)] if fastest else nothing)]
        )
        same = next(each for each in cases(tiny=False) if each.name == case)
        comparison += [
            [other["work"], other["source"], other["hardware"], *_speed(other, rate)] for other in published(same)
        ]
    timings = [[item, *_timing(row, rate)] for item, row in rows.items() if item != PRODUCTS]
    checks = [[f"{row['case']}: {row['variant']}", *_check(row["check"])] for row in variants if "check" in row]
    speed = ["samples/s", "real tokens/s", "of products", "memory, GB"]
    return (
        f"A large product in bfloat16 reaches {rate / 1e12:.3g} TFLOP/s.\n\n"
        f"{harness.table(['work', 'by', 'on', *speed], comparison)}\n"
        "All that was timed. Step: samples and the micro-batches that they are cut into. Waits: how often the host waits for "
        "the device in a step.\n\n"
        f"{harness.table(['case, variant', 'seconds per step', *speed, 'step', 'waits'], timings)}\n"
        f"Relative errors of a step's gradient, on a few layers: in {CUT} micro-batches beside one, and in bfloat16 beside "
        "float32. The last columns are faults\nmade on purpose, which the first check must find.\n\n"
        f"{harness.table(['case, variant', 'cut', 'bfloat16', 'exact', *FAULTS], checks)}"
    )


def _speed(row: dict, rate: float) -> list[str]:
    tokens = "" if row["tokens_per_second"] == row["samples_per_second"] else f"{row['tokens_per_second']:,.0f}"
    memory = f"{row['peak_memory'] / 1e9:.1f}" if "peak_memory" in row else ""
    part = row["of_products"] if "of_products" in row else row["flops_done_per_second"] / rate
    return [f"{row['samples_per_second']:,.1f}", tokens, f"{part:.1%}", memory]


def _timing(row: dict, rate: float) -> list[str]:
    if "seconds_per_step" not in row:
        return [verdict(row, False), *[""] * 6]
    waits = "" if row["host_waits"] is None else str(row["host_waits"])
    step = f"{row['samples_per_step']} in {row['micro_steps'][0]}"
    return [f"{row['seconds_per_step']:.4f}", *_speed(row, rate), step, waits]


def _check(check: dict) -> list[str]:
    errors = f"{check['cut']:.1e} (at most {check['cut_bound']:.0e})"
    rounded = f"{check['bf16']:.2e} (at most {check['bf16_bound']:.2e})"
    faults = (f"{check['controls'][fault]:.1e}" for fault in FAULTS)
    return [errors, rounded, "yes" if check["exact"] else "**no**", *faults]


def table_of_lengths() -> dict:
    """Make LENGTHS from the sentence pairs that `samestep.data.sentence_pairs` makes of Python's documentation."""
    from samestep.data import sentence_pairs  # needs datasets and tokenizers, which nothing else here does

    tables = {}
    for length, num_bins in ((128, 16), (512, 32)):
        recipe = load("bert_small_cpu", {"max_seq_length": length, "max_position_embeddings": 512})
        source, _ = sentence_pairs.build(recipe)
        lengths = np.array([source.draw(0, sample_id).length for sample_id in range(len(source))])
        counts, _ = np.histogram(lengths[lengths < length], bins=num_bins, range=(0, length))
        tables[str(length)] = {"counts": counts.tolist(), "full": int((lengths == length).sum())}
    return {
        "about": "Tokens of sentence pairs, [CLS] and both [SEP] counted: bert_small_cpu's (builtin/python_docs, WordPiece of "
        "8,192), epoch 0, at most 128 and 512 tokens. counts: in bins of equal width from 0 on; full: of the greatest length.",
        "command": "cd benchmarks && python -m proof.speed",
        "lengths": tables,
    }


if __name__ == "__main__":
    LENGTHS.write_text(json.dumps(table_of_lengths(), indent=1) + "\n", encoding="utf-8")
