"""Model, dataset and collate function of a recipe, as users of transformers have them: what all peers train.

`prepare` writes once what they read: tokenized samples of their own lengths. They are those of our own programs, drawn for
epoch 0; a peer masks and pads them by transformers' collators.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from clock import Clock
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForPreTraining,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    default_data_collator,
)

from samestep.recipe.catalog import load
from samestep.recipe.recipe import Recipe


@dataclass
class Workload:
    """What is trained.

    Attributes:
        recipe: batch, learning rate, clipping.
        model: returns an output with `loss`, the mean over the batch.
        dataset, collate: of rows; a row's `length` is for samplers, the model does not see it.
    """

    recipe: Recipe
    model: nn.Module
    dataset: Dataset
    collate: Callable[[list[dict]], dict[str, torch.Tensor]]

    @property
    def optimizer(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """Class and settings of the optimizer."""
        recipe, scaled = self.recipe, self.recipe.scaled_hyperparameters()
        settings = {"lr": scaled.learning_rate, "weight_decay": recipe.weight_decay, "fused": True}
        if recipe.optimizer_name == "sgd":
            return torch.optim.SGD, settings | {"momentum": recipe.sgd_momentum}
        return torch.optim.AdamW, settings | {
            "betas": (scaled.adam_beta1, scaled.adam_beta2),
            "eps": scaled.adam_epsilon,
        }


class Samples(Dataset):
    """One image at a time, as a DataLoader wants them: channels first."""

    def __init__(self, source):
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        micro_batch = self.source.collate([self.source.draw(0, place)])
        return {"pixel_values": micro_batch["pixel_values"][0].contiguous(), "labels": micro_batch["labels"][0]}


def _rows(task: str, source) -> Iterator[dict[str, Any]]:
    """Make the samples of a text, as a tokenizer of transformers returns them."""
    for place in range(len(source)):
        sample = source.draw(0, place)
        if task == "bert_pretraining":
            a, b = len(sample.first), len(sample.second)
            ids = [source.cls, *sample.first.tolist(), source.sep, *sample.second.tolist(), source.sep]
            row = {"input_ids": ids, "token_type_ids": [0] * (a + 2) + [1] * (b + 1)}
            row["special_tokens_mask"] = [1] + [0] * a + [1] + [0] * b + [1]
            row["next_sentence_label"] = sample.is_random
        elif task == "gpt2_pretraining":
            if sample.length < source.max_length:
                continue
            row = {"input_ids": sample.tokens[:-1].tolist(), "labels": sample.tokens[:-1].tolist()}
        else:
            row = {"input_ids": sample.tokens.tolist(), "labels": int(sample.label)}
        yield row | {"length": sample.length}


def products(recipe: Recipe, lengths: np.ndarray) -> float:
    """Compute floating-point operations of transformers' BERT over ours, both without padding and at the same rate.

    Theirs of a sample of T tokens, forward: L T (8 h^2 + 4 h f + 4 h T) in the layers and, in pretraining, T (2 h^2 + 2 h V)
    in the head (`transformer.bert_flops`). Ours has of the last layer keys and values, T 4 h^2, the rest at w wanted tokens,
    w (4 h^2 + 4 h f + 4 h T), and the head at the w - 1 masked ones; a classifier's with a heads 8 h^2 + 4 h f + 4 a h T (see
    `attention._attention_alone`). A backward takes twice that.

    Args:
        recipe: of a BERT.
        lengths: T of each sample.
    """
    h, f, t = recipe.hidden_size, recipe.intermediate_size, lengths.astype(float)
    layer = t * (8 * h * h + 4 * h * f + 4 * h * t)
    head, masked = 0.0, np.zeros_like(t)
    last = 8 * h * h + 4 * h * f + 4 * recipe.num_attention_heads * h * t
    if recipe.task == "bert_pretraining":
        head, masked = 2.0 * h * (h + recipe.vocab_size), np.maximum(1, np.round((t - 3) * recipe.mlm_probability))
        last = t * 4 * h * h + (1 + masked) * (4 * h * h + 4 * h * f + 4 * h * t)
    theirs = recipe.num_hidden_layers * layer + t * head
    ours = (recipe.num_hidden_layers - 1) * layer + last + masked * head
    return float(theirs.sum() / ours.sum())


def prepare(folder: Path) -> dict[str, Any]:
    """Write what `build` reads into the folder of a recipe.yaml, and let our own programs find their data made, too.

    Returns:
        What the samples are like: of texts tokenizer entries, mean length, share of padding in random batches, share of
        samples of the greatest length; of BERT `products`, see there.
    """
    recipe = load(str(folder / "recipe.yaml"))
    source, _ = recipe.parts.find("data")(recipe)
    if recipe.task == "image_classification":
        return {"samples": len(source)}
    rows = datasets.Dataset.from_list(list(_rows(recipe.task, source)))
    rows.save_to_disk(folder / "rows")
    source.tokenizer.save_pretrained(folder / "tokenizer")
    lengths, batch = np.array(rows["length"]), recipe.global_batch_size
    order = np.random.default_rng(0).permutation(len(lengths))
    batches = lengths[order[: len(lengths) // batch * batch]].reshape(-1, batch)
    return {
        "samples": len(rows),
        "products": products(recipe, lengths) if recipe.task in ("bert_pretraining", "text_classification") else None,
        "pieces": len(source.tokenizer),
        "mean_length": float(lengths.mean()),
        "padding": float(1 - batches.sum() / (batches.max(1) * batch).sum()),
        "longest": float((lengths == source.max_length).mean()),
    }


def build(folder: Path, attention: str, clock: Clock) -> Workload:
    """Build the workload that was prepared in a folder.

    Args:
        folder: of recipe.yaml.
        attention: kernel of a transformer.
        clock: is told of every batch.
    """
    recipe = load(str(folder / "recipe.yaml"))
    torch.manual_seed(recipe.seed)
    if recipe.task == "image_classification":
        source, _ = recipe.parts.find("data")(recipe)
        model, dataset = ResNetForImageClassification(ResNetConfig(**recipe.architecture)), Samples(source)
        pad = default_data_collator
    else:
        dataset = datasets.load_from_disk(folder / "rows")
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    if recipe.task == "bert_pretraining":
        model = BertForPreTraining(BertConfig(**recipe.architecture))
        pad = DataCollatorForLanguageModeling(tokenizer, mlm_probability=recipe.mlm_probability)
    elif recipe.task == "gpt2_pretraining":
        model, pad = GPT2LMHeadModel(GPT2Config(**recipe.architecture)), default_data_collator
    elif recipe.task == "text_classification":
        num_labels = len(set(dataset["labels"]))
        model = BertForSequenceClassification(BertConfig(**recipe.architecture, num_labels=num_labels))
        pad = DataCollatorWithPadding(tokenizer)
    if recipe.unit == "token":
        model.set_attn_implementation(attention)

    def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
        clock.collated(sum(row.get("length", 1) for row in rows))
        return pad([{name: value for name, value in row.items() if name != "length"} for row in rows])

    return Workload(recipe, model.train(), dataset, collate)


def run(train: Callable[..., None]) -> None:
    """Let a peer train until it is ended: FOLDER STAMPS PRECISION ATTENTION and what else the peer takes."""
    folder, stamps, precision, attention, *more = sys.argv[1:]
    clock = Clock(stamps)
    train(build(Path(folder), attention, clock), precision, clock, 10**6, *more)
