"""Recipes that train models of transformers with an encoder and a decoder: one sequence to another."""

import dataclasses
from typing import Any, ClassVar

from samestep.recipe.recipe import Parts, Recipe, register
from samestep.recipe.rules import Rule, each, is_at_most, is_multiple, rows
from samestep.recipe.settings import (
    FRACTION,
    LAYERS,
    LENGTH,
    POSITIVE,
    VOCABULARY,
    WIDTH,
    choice,
    limit,
    setting,
)
from samestep.recipe.tasks.causal_lm_finetuning import DRAWN_SIZES
from samestep.recipe.tasks.decoder import list_adapter_rules, list_shape_rules
from samestep.recipe.tasks.freezing import FREEZE
from samestep.recipe.tasks.streamed import StreamedTexts

DRAWN = {"builtin/spelled_dates_and_numbers": "text", "builtin/spoken_digits": "speech"}
"""Datasets that are drawn, and what their sources are."""
POSITIONS_PER_SECOND = 50
"""Positions of an encoder of speech, for each second."""
SHAPE = (
    "hidden_size",
    "num_hidden_layers",
    "num_decoder_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "initializer_range",
)
"""Fields that weights to start from decide."""
MAY_BE_NULL = ("num_decoder_layers", "max_position_embeddings", "tie_word_embeddings", "initializer_range")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seq2SeqFineTuning(StreamedTexts, Recipe):
    """Training of a model with an encoder and a decoder: all of it or adapters (LoRA), on pairs of sequences."""

    extra: ClassVar[str | None] = "text"

    # Data
    modality: str = setting("what sources are: text, or speech (recordings, of Whisper)", choice("text", "speech"))
    train_file: tuple[str, ...] | None = setting("sources and targets: csv, tsv, jsonl, parquet; globs", decides=False)
    validation_file: tuple[str, ...] | None = setting("held-out ones; null: validation_fraction", decides=False)
    dataset_name: str | None = setting(f"{', '.join(DRAWN)}, or a dataset of the hub", decides=False)
    dataset_config_name: str | None = setting("configuration of the hub dataset", decides=False)
    validation_split_name: str | None = setting(
        "split of the hub dataset that is held out; null: validation_fraction", decides=False
    )
    validation_fraction: float = setting(
        "fraction of the samples held out, drawn by the seed, unless others are named or data are drawn", FRACTION
    )
    num_train_samples: int | None = setting("samples to draw; null with other data", POSITIVE, decides=False)
    num_validation_samples: int | None = setting(
        "held-out samples to draw beside them; null with other data", POSITIVE, decides=False
    )
    source_column: str | None = setting("column of the sources; null: found by its name", decides=False)
    target_column: str | None = setting("column of the targets; null: found by its name", decides=False)
    source_language: str | None = setting(
        "language of the sources. Of mBART and NLLB a token as eng_Latn, of Whisper a name as german. A key of a column "
        "`translation`; null: none"
    )
    target_language: str | None = setting(
        "language of the targets, as source_language; of Whisper that of the sources, or english; null: none"
    )
    source_prefix: str = setting("text in front of each source, as T5's translate English to German: ")
    max_source_length: int = setting(
        "tokens of a source; longer ones are cut at their end; of speech positions of 20 ms, to which all are padded",
        limit(2**24, 2),
    )
    max_target_length: int = setting("tokens of a target; longer ones are cut at their end", limit(2**24, 2))

    # Loss
    label_smoothing: float = setting(
        "share of each target that all tokens of the vocabulary divide between them (1512.00567); evaluations have none",
        FRACTION,
    )
    count_forced_tokens: bool = setting(
        "whether first tokens of a target that generation forces (its language) are targets; false: they are given"
    )

    # Model
    tokenizer_name: str | None = setting(
        "tokenizer to load; null: that of model_name_or_path, or one trained on the texts", decides=False
    )
    tokenizer: str = setting(
        "tokenizer to train when there is none to load: byte_level_bpe or characters",
        choice("byte_level_bpe", "characters"),
    )
    vocab_size: int | None = setting(
        "vocabulary: of the tokenizer to train, or rows of the embedding; null: those of the model or of tokenizer_name",
        VOCABULARY,
    )
    model_name_or_path: str | None = setting(
        "weights to start from, which decide the shape; null: random, of the shape below", decides=False
    )
    architecture: str | None = setting(
        "model_type of transformers: t5, bart, mbart, m2m_100, pegasus, whisper; null with weights"
    )
    hidden_size: int | None = setting("width; null with weights, as all that follow", WIDTH)
    num_hidden_layers: int | None = setting("layers of the encoder", LAYERS)
    num_decoder_layers: int | None = setting("layers of the decoder; null: num_hidden_layers", LAYERS)
    num_attention_heads: int | None = setting("heads of both; divides hidden_size", WIDTH)
    intermediate_size: int | None = setting("width of the feed-forward layers", limit(2**20))
    max_position_embeddings: int | None = setting(
        "positions; at least max_source_length and max_target_length; null: the architecture has none, as t5", LENGTH
    )
    tie_word_embeddings: bool | None = setting(
        "whether the head is the embedding's matrix; null: the architecture's own"
    )
    initializer_range: float | None = setting(
        "standard deviation of the initial weights; null: the architecture's own", POSITIVE
    )
    dropout: float | None = setting(
        "all dropout of the model, drawn by sample; null: as its configuration has it", FRACTION
    )

    # Adapters
    lora_rank: int | None = setting("rank of the adapters that are trained (2106.09685); null: all weights", WIDTH)
    lora_alpha: float | None = setting("adapters are scaled by lora_alpha / lora_rank; null without adapters", POSITIVE)
    lora_dropout: float = setting("dropout before adapters, drawn by sample", FRACTION)
    lora_targets: tuple[str, ...] = setting("all-linear, or names of the layers that get adapters")
    freeze: tuple[str, ...] | None = setting(FREEZE)

    objective: ClassVar[str] = "sft"
    """As evaluations know it: sums over tokens."""
    use_rslora: ClassVar[bool] = False
    use_dora: ClassVar[bool] = False
    modules_to_save: ClassVar[None] = None

    rules = rows(
        # Data
        *each(
            DRAWN_SIZES,
            lambda name: Rule(
                lambda f: f[name] is None and f.dataset_name in DRAWN,
                f"{name} is null, but {{f.dataset_name}} is drawn",
                "set it to a number of samples",
            ),
        ),
        *each(
            DRAWN_SIZES,
            lambda name: Rule(
                lambda f: f[name] is not None and f.dataset_name not in DRAWN,
                f"{name} is {{f[{name}]}}, but the data are not drawn",
                "set it to null",
            ),
        ),
        Rule(
            lambda f: DRAWN.get(f.dataset_name, f.modality) != f.modality and DRAWN[f.dataset_name],
            "modality is {f.modality}, but {f.dataset_name} has {found}",
            "set modality to {found}",
        ),
        Rule(
            lambda f: f.modality == "speech" and f.max_source_length % POSITIONS_PER_SECOND,
            f"max_source_length is {{f.max_source_length}}, but speech is padded to whole seconds of {POSITIONS_PER_SECOND}",
            f"set it to a multiple of {POSITIONS_PER_SECOND}",
        ),
        Rule(
            lambda f: f.streaming and f.modality == "speech",
            "modality is speech, but streaming is true, and only texts are streamed",
            "set streaming to false",
        ),
        Rule(
            lambda f: f.modality == "speech" and f.source_prefix,
            "source_prefix is {f.source_prefix!r}, but modality is speech",
            "leave it empty",
        ),
        Rule(
            lambda f: (f.source_column is None) != (f.target_column is None),
            "of source_column and target_column one is set",
            "name both, or neither",
        ),
        Rule(
            lambda f: (f.source_language is None) != (f.target_language is None),
            "of source_language and target_language one is set",
            "give both, or neither",
        ),
        # Shape
        *list_shape_rules(SHAPE, MAY_BE_NULL),
        is_multiple("hidden_size", "num_attention_heads"),
        Rule(
            lambda f: (
                f.modality == "text"
                and f.max_position_embeddings is not None
                and f.max_source_length > f.max_position_embeddings
            ),
            "max_source_length {f.max_source_length} exceeds max_position_embeddings {f.max_position_embeddings}",
            "lower the first or raise the second",
        ),
        is_at_most("max_target_length", "max_position_embeddings"),
        # Adapters
        *list_adapter_rules(("lora_alpha", "lora_dropout")),
    )

    def decisive_fields(self) -> dict[str, Any]:
        fields = super().decisive_fields()
        if self.freeze is None:  # fingerprints of earlier versions, which had none
            del fields["freeze"]
        return fields

    @property
    def max_seq_length(self) -> int:
        """Tokens of a sample, source and target, at most."""
        return self.max_source_length + self.max_target_length

    @property
    def loss_weights(self) -> dict[str, float]:
        """Name and weight of the only loss term, a mean over target tokens."""
        return {"seq2seq": 1.0}

    @property
    def model_in_words(self) -> str:
        return super().model_in_words + ("" if self.lora_rank is None else " by LoRA")

    @property
    def shape(self) -> dict[str, Any]:
        """The shape of a model with random weights; null where the architecture decides."""
        return {name: getattr(self, name) for name in SHAPE}

    @property
    def small_shape(self) -> dict[str, Any]:
        if self.model_name_or_path is None:
            assert self.num_hidden_layers is not None  # as no checkpoint gives it
            layers = min(2, self.num_hidden_layers)
            return {"num_hidden_layers": layers, "num_decoder_layers": layers}
        small: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
        small |= {"architecture": "t5" if self.modality == "text" else "whisper", "num_hidden_layers": 2}
        return small | {"model_name_or_path": None, "tokenizer_name": self.tokenizer_name or self.model_name_or_path}


register(
    "seq2seq_finetuning",
    Seq2SeqFineTuning,
    Parts(
        settings="samestep.recipe.task_settings:Seq2SeqSettings",
        data="samestep.data.seq2seq:build",
        model="samestep.models.seq2seq:Seq2SeqSums",
        shape="stepplan.readers:seq2seq_finetuning",
        script="finetune_seq2seq.py",
        pipeline_tag="text2text-generation",
    ),
)
