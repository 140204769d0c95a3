"""Recipes that train embeddings of texts."""

import dataclasses
from typing import Any, ClassVar

from samestep.recipe.reading import format_value
from samestep.recipe.recipe import Parts, Recipe, register
from samestep.recipe.rules import Rule, each, rows
from samestep.recipe.settings import FRACTION, LAYERS, LENGTH, POSITIVE, VOCABULARY, WIDTH, choice, limit, setting
from samestep.recipe.tasks.decoder import SHAPE, list_adapter_rules, list_decoder_rules, list_shape_rules
from samestep.recipe.tasks.streamed import StreamedTexts

BUILTIN = "builtin/python_docs_pairs"
SIZES = (
    "must be numbers greater than 0, each once, ascending",
    lambda sizes: len(sizes) > 0 and sizes[0] > 0 and list(sizes) == sorted(set(sizes)),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingTraining(StreamedTexts, Recipe):
    """Contrastive training of embeddings: a query's own text among the texts of all samples of a step."""

    extra: ClassVar[str | None] = "text"

    # Data
    train_file: tuple[str, ...] | None = setting("pairs of texts: csv, tsv, jsonl, parquet; globs", decides=False)
    validation_file: tuple[str, ...] | None = setting("held-out pairs; null: validation_fraction", decides=False)
    dataset_name: str | None = setting(f"{BUILTIN}, or a dataset of the hub", decides=False)
    dataset_config_name: str | None = setting("configuration of the hub dataset", decides=False)
    validation_split_name: str | None = setting(
        "split of the hub dataset that is held out; null: validation_fraction", decides=False
    )
    validation_fraction: float = setting(
        "fraction of the pairs held out, unless others are named; of builtin data by module", FRACTION
    )
    query_column: str | None = setting("column of the queries; null: found by its name", decides=False)
    positive_column: str | None = setting("column of the text that belongs to a query; null: found", decides=False)
    negative_columns: tuple[str, ...] | None = setting(
        "columns of texts, or of lists of texts, that do not belong to it (hard negatives); null: found", decides=False
    )
    num_negatives: int = setting(
        "hard negatives of a sample, the first ones of its row; 0: none are used", limit(1000, 0)
    )
    query_prefix: str = setting("text in front of each query, as an instruction")
    document_prefix: str = setting("text in front of each other text")
    max_seq_length: int = setting("tokens of a text; longer ones are cut at their end", limit(2**24, 2))

    # Loss
    objective: str = setting(
        "info_nce: cross-entropy of each query's own text among all texts of the step (1807.03748); siglip: of each pair alone "
        "(2303.15343)",
        choice("info_nce", "siglip"),
    )
    symmetric: bool = setting(
        "of info_nce: the mean of it and of each text's own query among all queries, as CLIP has it"
    )
    temperature: float = setting(
        "similarities are divided by it", ("must be from 0.01 to 100", lambda value: 0.01 <= value <= 100)
    )
    similarity_bias: float = setting(
        "added to the similarities of siglip, behind that; 0 otherwise", limit(1000, -1000)
    )
    learn_temperature: bool = setting("learn the temperature, from 0.01 on, and the bias of siglip")
    mask_duplicates: bool = setting("of info_nce: a query's own text in another sample is no negative of it")
    false_negative_margin: float | None = setting(
        "of info_nce: a text that is nearer to a query than its own text, by more than this, is no negative of it. As in GIST "
        "(2402.16829) with the model as its own guide. null: all are",
        limit(2, -2),
    )
    matryoshka_sizes: tuple[int, ...] | None = setting(
        "the loss is the sum of those of the first so many numbers of each vector (2205.13147); null: of whole vectors",
        SIZES,
    )

    # Model
    pooling: str = setting(
        "of the tokens' vectors: mean, cls (the first), last_token", choice("mean", "cls", "last_token")
    )
    tokenizer_name: str | None = setting(
        "tokenizer to load; null: that of model_name_or_path, or one trained on the texts (WordPiece; with last_token "
        "byte-level BPE, and a token that ends each text)",
        decides=False,
    )
    vocab_size: int | None = setting(
        "vocabulary: of the tokenizer to train, or rows of the embedding; null: those of the model", VOCABULARY
    )
    model_name_or_path: str | None = setting(
        "weights to start from, which decide the shape; null: random, of the shape below", decides=False
    )
    architecture: str | None = setting("model_type of transformers: bert, modernbert, qwen3, ...; null with weights")
    hidden_size: int | None = setting("width; null with weights, as all that follow", WIDTH)
    num_hidden_layers: int | None = setting("layers", LAYERS)
    num_attention_heads: int | None = setting("heads; divides hidden_size", WIDTH)
    num_key_value_heads: int | None = setting("heads of keys and values; null: num_attention_heads", WIDTH)
    intermediate_size: int | None = setting("width of the feed-forward layer", limit(2**20))
    max_position_embeddings: int | None = setting("positions; at least max_seq_length", LENGTH)
    initializer_range: float | None = setting("standard deviation of the initial weights", POSITIVE)
    dropout: float | None = setting(
        "all dropout of the model, drawn by sample; null: as its configuration has it", FRACTION
    )

    # Adapters
    lora_rank: int | None = setting("rank of the adapters that are trained (2106.09685); null: all weights", WIDTH)
    lora_alpha: float | None = setting("adapters are scaled by lora_alpha / lora_rank; null without adapters", POSITIVE)
    lora_dropout: float = setting("dropout before adapters, drawn by sample", FRACTION)
    lora_targets: tuple[str, ...] = setting("all-linear, or names of the layers that get adapters")

    tie_word_embeddings: ClassVar[None] = None
    use_rslora: ClassVar[bool] = False
    use_dora: ClassVar[bool] = False
    modules_to_save: ClassVar[None] = None
    is_contrastive: ClassVar[bool] = True
    """A fact of the recipe, for rules about settings."""

    rules = rows(
        # Loss
        Rule(
            lambda f: f.global_batch_size == 1 and not (f.num_negatives and f.objective == "info_nce"),
            "global_batch_size is 1, but the loss compares the samples of a step",
            "set it to 2 or more",
        ),
        *each(
            (("symmetric", False), ("mask_duplicates", False), ("false_negative_margin", None), ("num_negatives", 0)),
            lambda name, value: Rule(
                lambda f: f.objective == "siglip" and f[name] != value,
                f"{name} is {{f[{name}]}}, but objective is siglip, whose pairs stand alone",
                f"set {name} to {format_value(value)}, or objective to info_nce",
            ),
        ),
        Rule(
            lambda f: f.false_negative_margin is not None and f.objective == "info_nce" and not f.mask_duplicates,
            "false_negative_margin is {f.false_negative_margin}, but mask_duplicates is false: rounding would decide whether "
            "a text that is equal to a query's own is nearer",
            "set mask_duplicates to true, or false_negative_margin to null",
        ),
        Rule(
            lambda f: f.objective == "info_nce" and f.similarity_bias != 0,
            "similarity_bias is {f.similarity_bias}, but objective is info_nce, which it does not change",
            "set it to 0",
        ),
        Rule(
            lambda f: f.negative_columns and not f.num_negatives,
            "negative_columns is set, but num_negatives is 0",
            "set how many of each row are used, or leave the columns out",
        ),
        Rule(
            lambda f: (f.query_column is None) != (f.positive_column is None),
            "of query_column and positive_column one is set",
            "name both, or neither",
        ),
        Rule(
            lambda f: f.learn_temperature and f.lora_rank is not None,
            "learn_temperature is true, but lora_rank is {f.lora_rank}, whose checkpoints hold adapters and nothing else",
            "set learn_temperature to false, or lora_rank to null",
        ),
        # What is no sum over samples, or needs all of them in one place
        Rule(
            lambda f: f.communication,
            "communication is {f.communication!r}, but the loss compares the samples of all processes in each step",
            "set it to null",
        ),
        Rule(
            lambda f: f.batch_schedule is not None and f.batch_schedule.kind == "noise",
            "batch_schedule is {f.batch_schedule!r}, but the loss compares samples, so that none has a gradient of its own",
            "set it to null, or to a schedule of another kind",
        ),
        Rule(
            lambda f: f.is_contrastive and f.noise_scale_steps is not None,
            "noise_scale_steps is {f.noise_scale_steps}, but the loss compares samples, so that none has a gradient of its own",
            "leave it out",
        ),
        Rule(
            lambda f: f.is_contrastive and f.is_replica,
            "fault_tolerance is step, but the loss compares the samples of all processes, and replicas have only their own",
            "set it to none or restart",
        ),
        # Shape
        *list_shape_rules([name for name in SHAPE if name != "tie_word_embeddings"], ("num_key_value_heads",)),
        *list_decoder_rules("max_seq_length"),
        # Adapters
        *list_adapter_rules(("lora_alpha", "lora_dropout")),
    )

    def decisive_fields(self) -> dict[str, Any]:
        fields = super().decisive_fields()
        if self.false_negative_margin is None:  # fingerprints of earlier versions, which had no such field
            del fields["false_negative_margin"]
        return fields

    @property
    def loss_weights(self) -> dict[str, float]:
        """Name and weight of the only loss term, a mean over samples."""
        return {"contrastive": 1.0}

    @property
    def model_in_words(self) -> str:
        return super().model_in_words + ("" if self.lora_rank is None else " by LoRA")

    @property
    def shape(self) -> dict[str, Any]:
        """The shape of a model with random weights, as transformers' configuration of `architecture` takes it."""
        return {name: getattr(self, name) for name in SHAPE}

    @property
    def small_shape(self) -> dict[str, Any]:
        if self.model_name_or_path is None:
            assert self.num_hidden_layers is not None  # as no checkpoint gives it
            return {"num_hidden_layers": min(2, self.num_hidden_layers)}
        small: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
        small |= {"architecture": "llama" if self.pooling == "last_token" else "bert", "num_hidden_layers": 2}
        small |= {"max_position_embeddings": self.max_seq_length, "initializer_range": 0.02}
        return small | {"model_name_or_path": None, "tokenizer_name": self.tokenizer_name or self.model_name_or_path}


register(
    "embedding_training",
    EmbeddingTraining,
    Parts(
        settings="samestep.recipe.task_settings:EmbeddingSettings",
        data="samestep.data.text_pairs:build",
        model="samestep.models.text_embeddings:EmbeddingSums",
        script="train_embeddings.py",
        pipeline_tag="sentence-similarity",
    ),
)
