"""The fields that recipes of pretraining on documents share."""

import dataclasses
from typing import ClassVar

from samestep.recipe.recipe import Recipe
from samestep.recipe.rules import Rule, belongs_to, rows
from samestep.recipe.settings import FRACTION, LENGTH, NOT_NEGATIVE, POSITIVE, VOCABULARY, choice, setting
from samestep.recipe.tasks.streamed import StreamedTexts


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextPretraining(Recipe):
    """The fields that recipes of pretraining on documents share: where the text is, what is held out, the vocabulary."""

    extra: ClassVar[str | None] = "text"

    # Optimizer
    optimizer: str = setting(
        "adamw, or muon: matrices of layers by Muon (kellerjordan.github.io/posts/muon), embeddings, head, gains and biases by "
        "AdamW",
        choice("adamw", "muon"),
    )
    muon_learning_rate: float | None = setting(
        "peak learning rate of matrices at learning_rate_batch_size, of AdamW's size (updates are multiplied by 0.2 "
        "sqrt(max(rows, columns)), 2502.16982). It follows learning_rate's schedule and scaling; null with adamw",
        POSITIVE,
    )
    muon_momentum: float | None = setting("decay of Muon's momentum per step; null with adamw", FRACTION)
    muon_weight_decay: float | None = setting(
        "decoupled weight decay of matrices under Muon; null with adamw", NOT_NEGATIVE
    )

    # Data
    train_file: tuple[str, ...] | None = setting("training documents: txt, jsonl, csv, parquet; globs", decides=False)
    validation_file: tuple[str, ...] | None = setting("held-out documents; null: validation_fraction", decides=False)
    dataset_name: str | None = setting("builtin/python_docs, or a dataset of the hub", decides=False)
    dataset_config_name: str | None = setting("configuration of the hub dataset", decides=False)
    text_column: str = setting("column that holds a document's text (not for txt)", decides=False)
    txt_documents: str = setting(
        "documents of a txt file: blocks (blank lines separate them), files (it is one) or auto (files where several txt files "
        "are given, else blocks)",
        choice("auto", "blocks", "files"),
        decides=False,
    )
    validation_fraction: float = setting("fraction of the text held out, unless validation_file is set", FRACTION)
    validation_split: str = setting(
        "what is held out: random (documents drawn by the seed) or tail (the end of the text, by characters)",
        choice("random", "tail"),
    )
    tokenizer_name: str | None = setting("tokenizer to load; null: train one on the corpus", decides=False)
    vocab_size: int = setting("vocabulary: of the tokenizer to train, or expected of the one loaded", VOCABULARY)

    rules = rows(
        *belongs_to("muon", "muon_learning_rate", "muon_momentum", "muon_weight_decay"),
        Rule(
            lambda f: f.optimizer == "muon" and f.accumulation == "optimizer",
            "accumulation is optimizer, but optimizer is muon, which needs the whole gradient of a matrix at once",
            "set accumulation to gradient, or optimizer to adamw",
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalPretraining(StreamedTexts, TextPretraining):
    """The fields that recipes of pretraining by next tokens share: how documents become samples."""

    # Data
    tokenizer: str = setting(
        "tokenizer to train when tokenizer_name is null: byte_level_bpe or characters",
        choice("byte_level_bpe", "characters"),
    )
    block_size: int = setting("tokens per sample, all of them predicted but the first of a document", LENGTH)
    packing: bool = setting("true: documents one after the other, cut into blocks; false: a document, cut, per sample")
    document_mask: bool = setting("attention and positions stay inside a document of a block")

    rules = rows(
        Rule(
            lambda f: f.document_mask and not f.packing,
            "document_mask is true, but without packing a sample never holds two documents",
            "set it to false",
        ),
    )

    @property
    def tokens_per_sample(self) -> int | None:
        return self.block_size if self.packing else None

    @property
    def loss_weights(self) -> dict[str, float]:
        """Name and weight of the only loss term."""
        return {"lm": 1.0}
