"""Trainers of others on conversations, as `benchmarks/chats.py` measures them: FOLDER STAMPS PRECISION TRAINER ROWS [K].

TRAINER is sft (TRL's SFTTrainer) with padded, packed or padding_free rows, dpo (TRL's DPOTrainer) with padded ones, trainer
(transformers' Trainer) with rows that are padded in their order, or grouped by length, or exact, that Trainer made exact, with
rows that are padded, or rows, as `PackedLoss` computes them. A step is one micro-batch, or K; packed
rows are micro-batches of one row, since attention takes the row of all of a micro-batch's rows as one. `ours` and `floor` are
the script of this repository and its bare step, with the script and its flags instead of ROWS. Beside its stamps a program
writes STAMPS.base, the resident memory before its first step.

No trainer recomputes activations. Attention is torch's kernel, which was the faster one; TRL computes its head in tiles.
DPOTrainer computes the reference in advance, as ours does.
"""

import ctypes
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import floor
import numpy as np
import ours
import torch
import transformers
from clock import Clock

import samestep
from samestep.cut.order import Order
from samestep.models import adapters, causal_lm
from samestep.recipe.catalog import load
from samestep.recipe.recipe import Recipe
from samestep.step.losses import IGNORED

ROWS, TOKENIZER = "rows", "tokenizer"


# ---------------------------------------------------------------------------------------------------------------------
# Data and model, the same for all


def prepare(folder: Path) -> dict[str, Any]:
    """Write the samples of a recipe as rows of token ids, in the order in which our steps take them.

    Returns:
        What the samples are like; `supervised` are tokens that are trained.
    """
    recipe = load(str(folder / "recipe.yaml"))
    source, _ = recipe.parts.find("data")(recipe)
    batch = recipe.global_batch_size
    order = Order(len(source), batch, recipe.seed, recipe.epoch_end)
    samples = [
        source.draw(int(epoch), int(sample_id))
        for step in range(len(source) // batch)
        for epoch, sample_id in zip(*order.samples(step), strict=True)
    ]
    make = _make_pair if source.is_pairs else _make_row
    datasets.Dataset.from_list([make(sample) for sample in samples]).save_to_disk(folder / ROWS)
    source.tokenizer.save_pretrained(folder / TOKENIZER)
    lengths = np.array([length for sample in samples for length in sample.lengths])
    batches = lengths.reshape(-1, batch * len(samples[0].lengths))
    supervised = [int(sample.is_trained.sum()) for sample in samples]
    return {
        "samples": len(samples),
        "pieces": len(source.tokenizer),
        "quantiles": np.quantile(lengths, (0.05, 0.5, 0.95, 1)).astype(int).tolist(),
        "mean_length": float(lengths.mean()),
        "padding": float(1 - batches.sum() / (batches.max(1) * batches.shape[1]).sum()),
        "supervised": sum(supervised) / int(lengths.sum()),
        "first_steps": np.array(supervised).reshape(-1, batch)[:4].sum(1).tolist(),
    }


def _make_row(sample: Any) -> dict[str, list[int]]:
    labels = np.where(sample.is_trained, sample.tokens, IGNORED)
    return {"input_ids": sample.tokens.tolist(), "labels": labels.tolist()}


def _make_pair(sample: Any) -> dict[str, list[int]]:
    """Split a pair for DPOTrainer: what both answers follow, and the answers' trained tokens."""
    border, names, row = sample.lengths[0], ("chosen_ids", "rejected_ids"), {}
    for name, part in zip(names, (slice(border), slice(border, None)), strict=True):
        places = np.flatnonzero(sample.is_trained[part])
        row |= {"prompt_ids": sample.tokens[part][: places[0]].tolist(), name: sample.tokens[part][places].tolist()}
    return row


def build_model(recipe: Recipe) -> torch.nn.Module:
    """Build the recipe's model, with the weights that the script draws, and transformers' own attention."""
    torch.manual_seed(recipe.seed)
    model = causal_lm.build_model(recipe)
    model.set_attn_implementation("sdpa")
    return model if recipe.lora_rank is None else adapters.add_lora(model, recipe)


class Memory:
    """Notes the resident memory before the first step.

    Args:
        file: to write.
    """

    def __init__(self, file: Path):
        self.file = file

    def start(self) -> None:
        """Give back what is free, and let the process's largest resident memory (VmHWM) begin anew."""
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        status = Path("/proc/self/status").read_text(encoding="ascii")
        self.file.write_text(re.search(r"VmRSS:\s+(\d+) kB", status)[1], encoding="ascii")


# ---------------------------------------------------------------------------------------------------------------------
# Trainers


def settings(recipe: Recipe, precision: str, num_micro_batches: int, num_steps: int) -> dict[str, Any]:
    """Make the arguments that transformers' Trainer and those of TRL share."""
    return {
        "output_dir": "trainer",
        "max_steps": num_steps,
        "per_device_train_batch_size": recipe.global_batch_size // num_micro_batches,
        "gradient_accumulation_steps": num_micro_batches,
        "weight_decay": recipe.weight_decay,
        "max_grad_norm": recipe.max_grad_norm,
        "lr_scheduler_type": "constant",
        "bf16": precision == "bf16",
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",
        "dataloader_drop_last": True,
        "dataloader_pin_memory": False,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def make_optimizer(recipe: Recipe) -> tuple[type, dict[str, Any]]:
    """Choose the class and the settings of the optimizer."""
    scaled = recipe.scaled_hyperparameters()
    betas = {"betas": (scaled.adam_beta1, scaled.adam_beta2), "eps": scaled.adam_epsilon}
    return torch.optim.AdamW, {"lr": scaled.learning_rate, "weight_decay": recipe.weight_decay, "fused": True} | betas


def count_labels(batch: dict[str, torch.Tensor]) -> int:
    """Count the supervised tokens of a causal model's micro-batch."""
    mask = batch["completion_mask"] if "completion_mask" in batch else batch["labels"][:, 1:] != IGNORED
    return int(mask.sum())


def run_trainer(
    base: type,
    clock: Clock,
    memory: Memory,
    recipe: Recipe,
    count: Callable[[dict], int] = count_labels,
    **given: Any,
) -> None:
    """Let a trainer of class `base`, made of what is `given`, take steps, and tell the clock of them.

    Args:
        count: how many targets a micro-batch has.
    """

    class Stamped(base):
        step_loss, num_micro_batches = 0.0, 0

        def training_step(self, *arguments, **others) -> torch.Tensor:
            loss = super().training_step(*arguments, **others)
            self.step_loss, self.num_micro_batches = self.step_loss + loss.item(), self.num_micro_batches + 1
            return loss

    class StepEnd(transformers.TrainerCallback):
        def on_step_end(self, arguments, *_, **__):
            clock.step(made.step_loss, made.num_micro_batches)
            made.step_loss, made.num_micro_batches = 0.0, 0

    made = Stamped(**given, callbacks=[StepEnd()])
    collate = made.data_collator

    def counted(rows: list) -> dict[str, torch.Tensor]:
        batch = collate(rows)
        if len(rows) == made.args.per_device_train_batch_size:  # an exact trainer asks the loss about fewer first
            clock.collated(count(batch))
        return batch

    made.data_collator = counted
    made.optimizer_cls_and_kwargs = make_optimizer(recipe)
    memory.start()
    made.train()


def train(
    folder: Path,
    clock: Clock,
    memory: Memory,
    precision: str,
    trainer: str,
    rows: str,
    num_micro_batches: str = "1",
    num_steps: int = 10**6,
) -> None:
    """Let a trainer take steps; `trainer` and `rows` as above."""
    recipe, dataset = load(str(folder / "recipe.yaml")), datasets.load_from_disk(folder / ROWS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / TOKENIZER)
    model, arguments = build_model(recipe), settings(recipe, precision, int(num_micro_batches), num_steps)
    collator: dict[str, Any] = {}
    if trainer in ("trainer", "exact"):
        base, config = transformers.Trainer, transformers.TrainingArguments
        arguments |= {"train_sampling_strategy": "group_by_length"} if rows == "grouped" else {}
        collator = {"data_collator": transformers.DataCollatorForSeq2Seq(tokenizer)}
        if trainer == "exact":
            base, arguments["dataloader_drop_last"] = samestep.exact(base), False
            collator |= {"loss": samestep.PackedLoss(model)} if rows == "rows" else {}
    elif trainer == "dpo":
        from trl import DPOConfig as config
        from trl import DPOTrainer as base

        arguments |= {"precompute_ref_log_probs": True, "beta": recipe.preference_beta, "max_length": None}
        # Its rows are tokens already
        base._prepare_dataset = lambda self, dataset, *_: dataset
    else:
        from trl import SFTConfig as config
        from trl import SFTTrainer as base

        arguments |= {"max_length": None, "padding_free": rows == "padding_free"}
        if rows == "packed":
            arguments |= {"packing": True, "max_length": recipe.max_seq_length}
            num_tokens = sum(len(row) for row in dataset["input_ids"]) / len(dataset) * recipe.global_batch_size
            num_rows = max(1, round(num_tokens / recipe.max_seq_length))
            arguments |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": num_rows}

    given = {"model": model, "args": config(**arguments), "train_dataset": dataset, "processing_class": tokenizer}
    run_trainer(base, clock, memory, recipe, **given, **collator)


def count_supervised(data: Any, _: str) -> int:
    """Count the trained tokens of a step of ours."""
    return sum(len(micro_batch["labels"]) for micro_batch in data.micro_batches)


def run_script(
    clock: Clock,
    memory: Memory,
    program: str,
    words: list[str],
    models: Any = causal_lm,
    count: Callable[[Any, str], int] = count_supervised,
    build: str = "build_model",
) -> None:
    """Run a script of this repository, or its bare step, until this process is ended.

    Args:
        program: ours or floor.
        words: the script and its flags.
        models: module, or class, that builds its model.
        count: counts the targets of a step, see `ours.stamp`.
        build: name of what builds it.
    """
    if program == "floor":
        floor.strip(clock, load(words[words.index("--recipe") + 1]), count=count)
    else:
        ours.stamp(clock, count)
    build_model = getattr(models, build)

    def build_and_start(*arguments):
        model = build_model(*arguments)
        memory.start()
        return model

    setattr(models, build, build_and_start)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def main(folder: str, stamps: str, precision: str, program: str, *words: str) -> None:
    clock, memory = Clock(stamps), Memory(Path(f"{stamps}.base"))
    if program in ("ours", "floor"):
        run_script(clock, memory, program, list(words))
    else:
        train(Path(folder), clock, memory, precision, program, *words)


if __name__ == "__main__":
    main(*sys.argv[1:])
