"""Part 2: ten steps of AdamW or SGD, cut in time and in space, beside the same steps in one micro-batch on the same device."""

from collections.abc import Callable

import harness

from proof import tasks
from proof.tasks import FULL_FLOAT32, NO_GPU, Task

TITLE = "The same step, however it is cut"
ABOUT = """\
Ten steps of tiny models, 16 samples each: in micro-batches of 4 samples, of 5 (uneven), of at most the tokens of two of
the longest; beside the same steps in one micro-batch, by the same kernels on the same device. Largest relative
difference of a loss / relative distance of all parameters at the end. Exact: at most 1e-5 / 1e-4 in fp32, 1e-11 / 1e-12
in fp64. In bf16 the parameters may be twice as far from fp32's as those of one micro-batch are, which is in the column
rounding; there, models of sequences take torch's kernel of variable length (varlen) on the GPU. Processes: two that
share the device over gloo; one whose weights FSDP2 divides.
"""
CHATS = "finetune_causal_lm"
PAIRS = " --dataset_name builtin/drawn_pairs --train_on completions --objective dpo"
# Name -> program, flags; its kernel in 16 bits on GPUs, where that is not sdpa.
MODELS = {
    "GPT-2": ("pretrain_gpt2", " --resid_pdrop 0.1 --embd_pdrop 0.1", None),
    "BERT": ("pretrain_bert", " --hidden_dropout_prob 0.1", "varlen"),
    "SFT": (CHATS, "", "varlen"),
    "LoRA": (CHATS, " --lora_rank 4 --lora_alpha 8", "varlen"),
    "DPO": (CHATS, PAIRS, "varlen"),
    "QLoRA": (CHATS, " --lora_rank 4 --lora_alpha 8 --base_quantization nf4", "varlen"),
    "8-bit AdamW": (CHATS, " --optimizer adamw_8bit", "varlen"),
    "ResNet": ("train_image_classifier", "", None),
    "ResNet, exact batch norm": ("train_image_classifier", " --normalization batch --exact_batch_norm", None),
}
STEP = "--global_batch_size 16 --max_train_steps 10"
WHOLE = " --per_device_train_batch_size 16"
CUTS = {
    "4": " --per_device_train_batch_size 4",
    "uneven": " --per_device_train_batch_size 5",
}
MOST_TOKENS = {"pretrain_gpt2": 96, "pretrain_bert": 96, CHATS: 512}
"""Program -> tokens of two of its longest samples."""
# Precision -> of Accelerate, flags, bounds of losses and of parameters; None: twice the rounding.
PRECISIONS = {
    "fp32": ("no", "", (1e-5, 1e-4)),
    "bf16": ("bf16", "", None),
    "fp64": ("no", " --dtype float64", (1e-11, 1e-12)),
}
WAYS = {"2 processes": (2, False), "FSDP2": (1, True)}
"""Way -> processes, and whether weights are divided."""


def list_tasks(is_tiny: bool, has_gpu: bool) -> list[Task]:
    tasks_of_devices = []
    for device in ["cuda"] * has_gpu + ["cpu"] * (not is_tiny or not has_gpu):
        environment = NO_GPU if device == "cpu" else FULL_FLOAT32
        names = ("GPT-2", "SFT", "ResNet") if is_tiny else MODELS
        precisions = ("fp32", "bf16") if is_tiny else PRECISIONS
        for name in names:
            has = [precision for precision in precisions if (name, precision) != ("8-bit AdamW", "fp64")]
            items = tuple(f"{name}, {precision}, {device}" for precision in has)
            tasks_of_devices.append(Task("equivalence", items, environment))
        if device == "cuda" or is_tiny:
            ways = [f"GPT-2, {way}, {precision}, {device}" for way in WAYS for precision in list(precisions)[:2]]
            tasks_of_devices += [Task("equivalence", (item,), environment) for item in ways]
    return tasks_of_devices


def compute(item: str, is_tiny: bool) -> dict:
    return compute_by(_train, item)


def compute_by(train: Callable[..., tuple[list[float], dict]], item: str) -> dict:
    """Compute the row of an item by a function that trains as `_train` does."""
    *name, precision, device = item.split(", ")
    way = name.pop() if name[-1] in WAYS else None
    program, flags, kernel = MODELS[", ".join(name)]
    mixed_precision, dtype, bounds = PRECISIONS[precision]
    kernel = kernel if device == "cuda" and mixed_precision == "bf16" else None
    flags = f"{STEP}{flags}{dtype}"
    whole = train(program, flags + WHOLE, mixed_precision, kernel)
    row = {"bounds": bounds, "cuts": {}}
    if bounds is None:
        exact = train(program, flags + WHOLE, "no")
        row["rounding"] = tasks.distance(whole[1], exact[1])
    cuts = {way: CUTS["4"]} if way else dict(CUTS)
    if not way and program in MOST_TOKENS:  # images have none
        cuts["tokens"] = f"{WHOLE} --per_device_train_tokens {MOST_TOKENS[program]}"
    for name, cut in cuts.items():
        ours = train(program, flags + cut, mixed_precision, kernel, *WAYS.get(name, ()))
        losses = max(abs(a / b - 1) for a, b in zip(ours[0], whole[0], strict=True))
        row["cuts"][name] = {"losses": losses, "parameters": tasks.distance(ours[1], whole[1])}
        if bounds is None:
            row["cuts"][name]["rounding"] = tasks.distance(ours[1], exact[1])
    return row


def _train(
    program: str,
    flags: str,
    precision: str,
    kernel: str | None = None,
    num_processes: int = 0,
    is_sharded: bool = False,
) -> tuple[list[float], dict]:
    """Train; return the losses, and the parameters at the end by name.

    Args:
        kernel: see `tasks.train`.
        num_processes: processes of their own; 0: this one.
    """
    with tasks.output_folder("run") as folder:
        if num_processes:
            tasks.train_on(num_processes, program, flags, folder, precision, is_sharded)
        else:
            tasks.train(program, flags, folder, precision, kernel=kernel)
        return [row["loss"] for row in tasks.read_curve(folder)], tasks.read_tensors(folder)


def is_good(row: dict) -> bool:
    """Check the bounds; in bf16 the distance from fp32."""
    if "cuts" not in row:
        return False
    if row["bounds"] is None:
        return all(cut["rounding"] <= 2 * row["rounding"] for cut in row["cuts"].values())
    losses, parameters = row["bounds"]
    return all(cut["losses"] <= losses and cut["parameters"] <= parameters for cut in row["cuts"].values())


def markdown(rows: dict[str, dict]) -> str:
    lines, ways = [], []
    for item, row in rows.items():
        cells, good = {name: _cell(cut) for name, cut in row.get("cuts", {}).items()}, tasks.verdict(row, is_good(row))
        rounding = f"{row['rounding']:.1e}" if "rounding" in row else ""
        if way := next((way for way in WAYS if way in item), None):
            ways.append([item, good, cells.get(way, ""), rounding])
        else:
            lines.append([item, good, *(cells.get(name, "") for name in (*CUTS, "tokens")), rounding])
    text = harness.table(
        ["model, precision, device", "exact", "4 samples", "5, uneven", "by tokens", "rounding"], lines
    )
    return text + ("\n" + harness.table("in processes | exact | 4 samples each | rounding", ways) if ways else "")


def _cell(cut: dict) -> str:
    return f"{cut['losses']:.0e} / {cut['parameters']:.0e}"
