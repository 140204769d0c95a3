"""Part 4: memory and seconds of steps that `samestep plan` predicts, beside those that are measured."""

import dataclasses
import json
import shlex
import statistics
import subprocess
import sys
import time
from typing import Any

import harness

from proof import tasks
from proof.tasks import Task

TITLE = "What is planned, beside what is measured"
ABOUT = """\
Two micro-batches of full length and an optimizer step, of random numbers, as `samestep plan RECIPE --on 1xDEVICE` plans
them: peak memory that the allocator reports, without CUDA's own; seconds of a step, the median of four after two.
"""


@dataclasses.dataclass(frozen=True)
class Work:
    """What is planned and measured.

    Attributes:
        recipe: of the catalog.
        size: b, samples of a micro-batch.
        precision: of Accelerate.
        flags: of the plan: fields of the recipe, --gradient_checkpointing.
    """

    recipe: str
    size: int
    precision: str = "bf16"
    flags: str = ""

    @property
    def changes(self) -> dict[str, Any]:
        """Fields of the recipe that the flags change."""
        words = shlex.split(self.flags.replace(RECOMPUTED, ""))
        return {name.removeprefix("--"): json.loads(value) for name, value in zip(words[::2], words[1::2], strict=True)}


RECOMPUTED = "--gradient_checkpointing"
WORKS = {
    "GPT-2 124M": Work("gpt2_124m", 32),
    "GPT-2 124M, recomputed": Work("gpt2_124m", 64, flags=RECOMPUTED),
    "GPT-2 124M, fp32": Work("gpt2_124m", 16, "no"),
    "GPT-2 1558M": Work("gpt2_xl_8xa100", 6),
    "BERT-Large, length 128": Work("bert_large_phase1", 128),
    "BERT-Large, length 512": Work("bert_large_phase2", 32),
    "ResNet-50": Work("resnet50_imagenet_4xt4", 128),
    "Qwen3 0.6B, all weights": Work("qwen3_0.6b_sft_3090", 4),
    "Qwen3 0.6B, one sample of 16,384 tokens": Work("qwen3_0.6b_sft_3090", 1, flags="--max_seq_length 16384"),
    "Llama 3 8B, LoRA": Work("llama3_8b_lora_3090", 2),
    "Llama 3 8B, LoRA, recomputed": Work("llama3_8b_lora_3090", 8, flags=RECOMPUTED),
    "Llama 3 8B, QLoRA, recomputed": Work("llama3_8b_qlora_2080ti", 4, flags=RECOMPUTED),
}
TINY_WORKS = {
    "GPT-2, small": Work("gpt2_small_cpu", 2, "no"),
    "Llama, small, LoRA, recomputed": Work(
        "sft_small_cpu", 2, flags=f"{RECOMPUTED} --max_seq_length 64 --lora_rank 4 --lora_alpha 8"
    ),
}
NUM_STEPS, WARM_UP = 4, 2


def list_tasks(is_tiny: bool, has_gpu: bool) -> list[Task]:
    return [Task("planner", (name,), is_alone=True) for name in (TINY_WORKS if is_tiny else WORKS)]


def compute(item: str, is_tiny: bool) -> dict:
    work = (TINY_WORKS | WORKS)[item]
    row = {"recipe": work.recipe, "size": work.size, "flags": work.flags, "precision": work.precision}
    return row | plan(work) | measure(work)


def plan(work: Work) -> dict[str, float | str]:
    """Plan the work on this device, by the command that users type."""
    import torch

    from stepplan.hardware import find_device

    device = find_device(torch.cuda.get_device_name()) if tasks.has_gpu() else "cpu"
    words = ["samestep", "plan", work.recipe, "--on", f"1x{device}", "--global_batch_size", str(2 * work.size)]
    words += ["--per_device_train_batch_size", str(work.size), "--mixed_precision", work.precision, *work.flags.split()]
    done = subprocess.run([sys.executable, "-m", *words, "--json"], cwd=tasks.ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    answer = json.loads(done.stdout)
    return {"planned_memory": answer["memory"]["total"], "planned_seconds": answer["time"]["total"]}


def measure(work: Work) -> dict[str, float | None]:
    """Take the steps; the memory is None on a CPU."""
    import torch

    from proof import speed
    from proof.speed_cases import Step
    from samestep.recipe.catalog import load
    from samestep.step import optim
    from samestep.training import launch

    recipe = load(work.recipe, {"global_batch_size": 2 * work.size} | work.changes)
    accelerator = launch.create_accelerator(work.precision, is_reproducible=False)
    device = accelerator.device
    torch.manual_seed(recipe.seed)
    model, recipe = build(recipe, accelerator)
    if RECOMPUTED in work.flags:
        model.recompute_activations()
    optimizer = optim.from_recipe(model, recipe)
    model, optimizer = launch.prepare(accelerator, model.train(), optimizer)
    micro_batch = {
        name: value if value is None else randomize(name, value, recipe)
        for name, value in type(accelerator.unwrap_model(model)).example(recipe, work.size).items()
    }
    counts = torch.full((len(recipe.loss_weights),), 1000 * work.size)
    step = Step([micro_batch, micro_batch], [counts, counts], 2 * work.size, 0, 0, 0)
    seconds = []
    for number in range(WARM_UP + NUM_STEPS):
        if number == WARM_UP:
            tasks.free()
        begin = time.perf_counter()
        speed.take_step(accelerator, model, optimizer, step, recipe, number)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {"memory": memory, "step_seconds": statistics.median(seconds[WARM_UP:])}


def build(recipe: Any, accelerator: Any) -> tuple[Any, Any]:
    """Build the recipe's model with random weights on the device, of the shape that its base has; the recipe of that, too."""
    import torch

    from samestep.models import quantization
    from samestep.step import batch_norm
    from samestep.step.noise import noise_by_sample
    from stepplan import trace

    model_class, options, is_half = recipe.parts.find("model"), {}, False
    name = getattr(recipe, "model_name_or_path", None)
    if name is not None:
        recipe = dataclasses.replace(recipe, model_name_or_path=None)
    if name is not None and hasattr(recipe, "lora_rank"):
        options["shape"] = shape = trace.find_shape(name)
        recipe = dataclasses.replace(recipe, vocab_size=shape["vocab_size"], architecture=shape["model_type"])
        is_half = recipe.lora_rank is not None and recipe.base_quantization is None
    with torch.device(accelerator.device):
        model = model_class.from_recipe(recipe, None, **options)
    if is_half:  # as in the files of the base, which is not there
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.requires_grad:
                    parameter.copy_(parameter.to(torch.bfloat16))
        quantization.hold_base(model.model, torch.bfloat16)
    noise_by_sample(model, recipe.seed)
    batch_norm.synchronize(model)
    settings = recipe.parts.find("settings")(recipe=recipe.name)
    next(iter(model.kernel_candidates(accelerator.device, accelerator.mixed_precision, settings).values()))()
    return model.to(accelerator.device), recipe


def randomize(name: str, value: Any, recipe: Any) -> Any:
    """Draw token ids instead of zeros: rows of a table that are all the same one are added up one after the other."""
    import torch

    if name in ("input_ids", "labels", "masked_labels") and getattr(recipe, "vocab_size", None):
        return torch.randint(recipe.vocab_size, value.shape)
    return torch.randn(value.shape) if name == "pixel_values" else value


def is_good(row: dict) -> bool:
    """A row that was measured; how far the plan is off, the table shows."""
    return "step_seconds" in row


def markdown(rows: dict[str, dict]) -> str:
    lines, errors = [], {"memory": [], "step_seconds": []}
    for item, row in rows.items():
        if not is_good(row):
            lines.append([item, tasks.verdict(row, False), *[""] * 6])
            continue
        memory, seconds = (_compare(row, *pair) for pair in (("memory", 1e9), ("step_seconds", 1)))
        for name in errors:
            if row[name] is not None:
                errors[name].append(abs(row[_planned(name)] / row[name] - 1))
        lines.append([item, f"{row['recipe']} {row['flags']}".strip(), row["size"], *memory, *seconds])
    heads = ["work", "recipe", "b", "GB planned", "measured", "planned / measured", "s planned", "measured"]
    text = harness.table([*heads, "planned / measured"], [cells + [""] * (9 - len(cells)) for cells in lines])
    means = [
        f"{word}: {statistics.median(values):.1%} off in the median, {max(values):.1%} at the worst"
        for (name, values), word in zip(errors.items(), ("memory", "seconds"), strict=True)
        if values
    ]
    return text + (f"\n{'; '.join(means)}.\n" if means else "")


def _planned(name: str) -> str:
    return {"memory": "planned_memory", "step_seconds": "planned_seconds"}[name]


def _compare(row: dict, name: str, unit: float) -> list[str]:
    planned = row[_planned(name)]
    if row[name] is None:
        return [f"{planned / unit:.3g}", "", ""]
    return [f"{planned / unit:.3g}", f"{row[name] / unit:.3g}", f"{planned / row[name]:.3f}"]
