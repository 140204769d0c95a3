"""Recipes that fine-tune a classifier of texts."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from samestep.recipe.recipe import Parts, register
from samestep.recipe.rules import Rule, rows
from samestep.recipe.settings import FRACTION, VOCABULARY, setting
from samestep.recipe.tasks.bert import BertRecipe
from samestep.recipe.tasks.streamed import StreamedTexts


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextClassification(StreamedTexts, BertRecipe):
    """Fine-tuning BERT: a label, or a number, of a text or a pair of texts."""

    extra: ClassVar[str | None] = "text"

    # Data
    train_file: tuple[str, ...] | None = setting("labelled texts: csv, tsv, jsonl, parquet; globs", decides=False)
    validation_file: tuple[str, ...] | None = setting("held-out texts; null: validation_fraction", decides=False)
    dataset_name: str | None = setting("builtin/python_docs_parts, or a dataset of the hub", decides=False)
    dataset_config_name: str | None = setting("configuration of the hub dataset (of GLUE: the task)", decides=False)
    validation_split_name: str | None = setting(
        "split of the hub dataset that is held out; null: validation_fraction", decides=False
    )
    text_column: str | None = setting("column of the text; null: found by its name", decides=False)
    text_pair_column: str | None = setting(
        "column of the second text of a pair; null: found by its name, when text_column is null too", decides=False
    )
    label_column: str | None = setting("column of the label; null: found by its name", decides=False)
    validation_fraction: float = setting("fraction of the texts held out, unless others are named", FRACTION)
    num_labels: int | None = setting("classes; null: those of the training texts; 1: the label is a number", VOCABULARY)

    # What is trained, and how it is judged
    layerwise_lr_decay: float = setting(
        "learning rate of a layer / of the layer above it; 1: all the same",
        ("must lie in (0, 1]", lambda v: 0 < v <= 1),
    )
    freeze_embeddings: bool = setting("leave the embeddings as they are")
    metrics: tuple[str, ...] = setting("metrics of the held-out texts: ours, or of the hub", decides=False)

    rules = rows(
        Rule(
            lambda f: f.freeze_embeddings and f.model_name_or_path is None,
            "freeze_embeddings is true, but model_name_or_path is not set",
            "they would stay random",
        ),
        Rule(
            lambda f: f.text_pair_column is not None and f.text_column is None,
            "text_pair_column is set, but text_column is not",
            "name both, or neither",
        ),
        Rule(
            lambda f: f.streaming and f.num_labels is None and f.validation_file is None,
            "num_labels is null, but streaming is true, and labels of a stream cannot be counted before",
            "give a validation_file that has all classes, or num_labels (of N classes the labels are 0 to N - 1)",
        ),
        Rule(lambda f: not f.metrics, "metrics is empty", "name at least one, for example accuracy"),
    )

    def find_fields_of_data(self, typed: Mapping[str, Any]) -> dict[str, Any]:
        is_own = typed.get("train_file") is not None and not self.streaming
        return {"num_labels": None} if is_own and "num_labels" not in typed and self.num_labels is not None else {}

    @property
    def small_shape(self) -> dict[str, Any]:
        return super().small_shape | {"freeze_embeddings": False}

    @property
    def loss_weights(self) -> dict[str, float]:
        """Name and weight of the only loss term: cross-entropy, or the squared error of a number."""
        return {"label": 1.0}


register(
    "text_classification",
    TextClassification,
    Parts(
        settings="samestep.recipe.task_settings:FineTuningSettings",
        data="samestep.data.labelled_texts:build",
        model="samestep.models.text_classification:ClassificationSums",
        shape="stepplan.memory:text_classification",
        script="finetune_classifier.py",
        pipeline_tag="text-classification",
    ),
)
