"""transformers' Seq2SeqTrainer, as `benchmarks/seq2seq.py` measures it: FOLDER STAMPS PRECISION PROGRAM ROWS [K].

PROGRAM is trainer, with rows that are padded in their order, or grouped by length; a step is one micro-batch, or K. `ours` and
`floor` are the script of this repository and its bare step, with the script and its flags instead of ROWS. Rows are padded by
DataCollatorForSeq2Seq, to the longest source and the longest target of a micro-batch. Beside its stamps a program writes
STAMPS.base, the resident memory when its model has been built.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from chat_trainers import ROWS, TOKENIZER, Memory, run_script, run_trainer, settings
from clock import Clock

from samestep.cut.order import Order
from samestep.data.steps import StepData
from samestep.models import seq2seq
from samestep.recipe.catalog import load
from samestep.recipe.recipe import Recipe
from samestep.step.losses import IGNORED


def prepare(folder: Path) -> dict[str, Any]:
    """Write the samples of a recipe as rows of token ids, in the order in which our steps take them.

    Returns:
        what the samples are like.
    """
    recipe = load(str(folder / "recipe.yaml"))
    source, _ = recipe.parts.find("data")(recipe)
    batch = recipe.global_batch_size
    order = Order(len(source), batch, recipe.seed, recipe.epoch_end)
    pairs = [
        source.draw(int(epoch), int(sample_id))
        for step in range(len(source) // batch)
        for epoch, sample_id in zip(*order.samples(step), strict=True)
    ]
    rows = [{"input_ids": pair.source.tolist(), "labels": pair.labels.tolist()} for pair in pairs]
    datasets.Dataset.from_list(rows).save_to_disk(folder / ROWS)
    source.tokenizer.save_pretrained(folder / TOKENIZER)
    # [pairs, 2]: tokens of the source, and of the target
    lengths = np.array([[len(row["input_ids"]), len(row["labels"])] for row in rows])
    batches = lengths.reshape(-1, batch, 2)
    return {
        "samples": len(pairs),
        "pieces": len(source.tokenizer),
        "quantiles": np.quantile(lengths, (0.05, 0.5, 0.95, 1), 0).astype(int).T.tolist(),
        "mean_lengths": lengths.mean(0).tolist(),
        "padding": float(1 - lengths.sum() / (batches.max(1).sum() * batch)),
        "first_steps": batches[:4, :, 1].sum(1).tolist(),
    }


def build_model(recipe: Recipe, tokenizer: Any) -> torch.nn.Module:
    """Build the recipe's model, with the weights that the script draws, and transformers' own attention."""
    torch.manual_seed(recipe.seed)
    return seq2seq.build_model(recipe, SimpleNamespace(tokenizer=tokenizer))[0]


def train(
    folder: Path,
    clock: Clock,
    memory: Memory,
    precision: str,
    rows: str,
    num_micro_batches: str = "1",
    num_steps: int = 10**6,
) -> None:
    """Let Seq2SeqTrainer take steps; `rows` as above."""
    recipe, dataset = load(str(folder / "recipe.yaml")), datasets.load_from_disk(folder / ROWS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / TOKENIZER)
    model = build_model(recipe, tokenizer)
    arguments = settings(recipe, precision, int(num_micro_batches), num_steps)
    arguments |= {"train_sampling_strategy": "group_by_length"} if rows == "grouped" else {}

    run_trainer(
        transformers.Seq2SeqTrainer,
        clock,
        memory,
        recipe,
        lambda batch: int((batch["labels"] != IGNORED).sum()),
        model=model,
        args=transformers.Seq2SeqTrainingArguments(**arguments),
        train_dataset=dataset,
        processing_class=tokenizer,
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer, model=model),
    )


def count_targets(data: StepData, _: str) -> int:
    """Count the target tokens of a step of ours."""
    return sum(len(micro_batch["label_index"]) for micro_batch in data.micro_batches)


def main(folder: str, stamps: str, precision: str, program: str, *words: str) -> None:
    clock, memory = Clock(stamps), Memory(Path(f"{stamps}.base"))
    if program == "trainer":
        train(Path(folder), clock, memory, precision, *words)
    else:
        run_script(clock, memory, program, list(words), seq2seq, count_targets)


if __name__ == "__main__":
    main(*sys.argv[1:])
