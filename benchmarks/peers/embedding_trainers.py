"""sentence-transformers' trainer with its cached loss, as `benchmarks/embeddings.py` measures it: FOLDER STAMPS [SIZE].

Without SIZE it is ours: FOLDER STAMPS ours SCRIPT FLAGS. SIZE is the number of texts that its loss embeds at a time. Beside its
stamps a program writes STAMPS.base, the resident memory when its model has been built.
"""

import sys
from pathlib import Path

import datasets
import torch
import transformers
from chat_trainers import Memory, make_optimizer, run_script
from clock import Clock
from torch.utils.data import BatchSampler, SequentialSampler

from samestep.cut.order import Order
from samestep.data import text_pairs
from samestep.models import text_embeddings
from samestep.recipe.catalog import load

MODEL, ROWS = "model", "rows"


def prepare(folder: Path) -> dict[str, int | float]:
    """Write the recipe's model with its first weights, and its pairs in the order in which our steps take them.

    Returns:
        what the texts are like.
    """
    recipe = load(str(folder / "recipe.yaml"))
    train, _ = text_pairs.build(recipe)
    torch.manual_seed(recipe.seed)
    text_embeddings.EmbeddingSums.from_recipe(recipe, train).save(folder / MODEL, recipe, train)
    order = Order(len(train), recipe.global_batch_size, recipe.seed, recipe.epoch_end)
    steps = range(len(train) // recipe.global_batch_size)
    numbers = [int(number) for step in steps for number in order.samples(step)[1]]
    rows, _ = text_pairs.load_rows(train_file=recipe.train_file)
    rows.select(numbers).select_columns(["query", "positive"]).save_to_disk(folder / ROWS)
    lengths = [len(tokens) for number in numbers for tokens in train.draw(0, number).tokens]
    return {"mean_length": sum(lengths) / len(lengths), "most": max(lengths)}


def train(folder: Path, clock: Clock, memory: Memory, size: int) -> None:
    """Let the trainer of sentence-transformers take steps."""
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss

    recipe = load(str(folder / "recipe.yaml"))
    model = SentenceTransformer(str(folder / MODEL), device=None if torch.cuda.is_available() else "cpu")
    arguments = SentenceTransformerTrainingArguments(
        output_dir="trainer",
        max_steps=10**6,
        per_device_train_batch_size=recipe.global_batch_size,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        lr_scheduler_type="constant",
        use_cpu=not torch.cuda.is_available(),
        dataloader_drop_last=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )

    class StepEnd(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            clock.collated(recipe.global_batch_size)
            clock.step(made.step_loss)

    class Stamped(SentenceTransformerTrainer):
        def get_batch_sampler(self, dataset, batch_size, drop_last, **_):
            return BatchSampler(SequentialSampler(dataset), batch_size, drop_last)

        def training_step(self, *arguments, **others) -> torch.Tensor:
            loss = super().training_step(*arguments, **others)
            self.step_loss = loss.item()
            return loss

    made = Stamped(
        model=model,
        args=arguments,
        train_dataset=datasets.load_from_disk(folder / ROWS),
        loss=CachedMultipleNegativesRankingLoss(model, scale=1 / recipe.temperature, mini_batch_size=size),
        callbacks=[StepEnd()],
    )
    made.optimizer_cls_and_kwargs = make_optimizer(recipe)
    memory.start()
    made.train()


def main(folder: str, stamps: str, size: str, *words: str) -> None:
    clock, memory = Clock(stamps), Memory(Path(f"{stamps}.base"))
    if size == "ours":
        count, models = (lambda data, _: data.num_samples), text_embeddings.EmbeddingSums
        run_script(clock, memory, "ours", list(words), models, count, "from_recipe")
    else:
        train(Path(folder), clock, memory, int(size))


if __name__ == "__main__":
    main(*sys.argv[1:])
