"""The settings of a run that only some tasks have."""

import dataclasses
from typing import Any, ClassVar

from samestep.recipe.run_settings import RunSettings
from samestep.recipe.settings import LENGTH, POSITIVE, PROBABILITY, choice, limit, setting

GENERATION_METRICS = ("exact_match", "bleu", "chrf", "word_error_rate", "rouge")
GENERATION_SCORES = ("exact_match", "bleu", "chrf", "word_error_rate", "rouge1", "rouge2", "rougeL")
"""Metrics of generated targets, and the numbers that an evaluation has of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings(RunSettings):
    """Settings of one run that trains on data which others have made."""

    on_bad_row: str = setting(
        "rows, images and the like that cannot be used: refuse them all in one message, or skip them and list them in "
        "OUTPUT_DIR/skipped_rows.jsonl",
        choice("refuse", "skip"),
        default="refuse",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelSettings(DataSettings):
    """Settings of one run that trains a transformer on tokens."""

    may_shard: ClassVar[bool] = True

    per_device_train_tokens: int | None = setting(
        "most tokens in one forward, padding included; none: no such limit", POSITIVE, default=None
    )
    attn_implementation: str | None = setting(
        "attention kernel; none: sdpa on a GPU, on a CPU the one measured to be faster",
        choice("sdpa", "eager"),
        default=None,
    )
    gradient_checkpointing: bool = setting("recompute activations in the backward", default=False)
    fsdp_gather: str = setting(
        "type in which sharded weights (FSDP2) are gathered under mixed precision bf16. bf16: half of the traffic and no "
        "16-bit copy of all weights. fp32: exactly the rounding of whole weights",
        choice("bf16", "fp32"),
        default="bf16",
    )
    torch_compile: bool = setting("compile each layer; needs a C++ compiler, and minutes at the start", default=False)

    @property
    def accelerator_options(self) -> dict[str, Any]:
        return super().accelerator_options | {"fsdp_gather": self.fsdp_gather}

    @property
    def memory_remedy(self) -> str:
        return "--gradient_checkpointing or shorter samples, or share the weights among processes (FSDP2)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestModelSettings(LanguageModelSettings):
    """Settings of one run that compares its evaluations."""

    may_shard: ClassVar[bool] = False

    metric_for_best_model: str | None = setting(
        "which evaluation is the best one: loss or another metric of evaluations; none: the recipe's first, or loss",
        default=None,
    )
    early_stopping_patience: int | None = setting(
        "end the training after so many evaluations that are no better; none: never", POSITIVE, default=None
    )
    load_best_model_at_end: bool = setting("leave the best evaluation's model, not the last step's", default=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuningSettings(BestModelSettings):
    """Settings of one run that fine-tunes a classifier."""

    predict_file: tuple[str, ...] | None = setting(
        "texts to label at the end, columns as in train_file; none: no texts", default=None
    )
    trust_metric_code: bool = setting(
        "run the code of metrics that are not local: of the hub, or a file", default=False
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalLmFineTuningSettings(BestModelSettings):
    """Settings of one run that fine-tunes a causal language model."""

    may_shard: ClassVar[bool] = True

    metric_for_best_model: str | None = setting(
        "which evaluation is the best one, by what it has of these; none: loss",
        choice("loss", "perplexity", "accuracy", "margin", "exact_match"),
        default=None,
    )
    num_generations: int = setting(
        "held-out prompts that the model answers at an evaluation, the same ones at each; 0: none",
        limit(10**6, 0),
        default=100,
    )
    generation_length: int = setting("tokens of an answer, at most", LENGTH, default=64)
    merge_adapter: bool = setting(
        "merge the adapter into the base's weights at the end, in float32, and measure on held-out logits what is lost when "
        "they are saved",
        default=False,
    )
    merge_dtype: str = setting(
        "type in which merged weights are saved: base, the one of the base's files, or float32",
        choice("base", "float32"),
        default="base",
    )
    max_merge_loss: float = setting(
        "largest share of what the adapter does to logits that a merge may lose; a merge that loses more is not written",
        PROBABILITY,
        default=0.01,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingSettings(BestModelSettings):
    """Settings of one run that trains embeddings."""

    metric_for_best_model: str | None = setting(
        "which evaluation is the best one; none: ndcg_at_10",
        choice("loss", "recall_at_1", "recall_at_10", "ndcg_at_10"),
        default=None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seq2SeqSettings(BestModelSettings):
    """Settings of one run that trains a model of sequence to sequence."""

    may_shard: ClassVar[bool] = True

    metric_for_best_model: str | None = setting(
        "which evaluation is the best one, by what it has of these; none: loss",
        choice("loss", "perplexity", "accuracy", *GENERATION_SCORES),
        default=None,
    )
    generation_metrics: tuple[str, ...] = setting(
        "scores of generated targets: exact_match, bleu and chrf (sacrebleu), word_error_rate (jiwer), rouge (rouge1, rouge2, "
        "rougeL)",
        (f"must be of {', '.join(GENERATION_METRICS)}", lambda names: set(names) <= set(GENERATION_METRICS)),
        default=("exact_match",),
    )
    num_generations: int = setting(
        "held-out sources whose targets are generated at an evaluation, the same ones at each; 0: none",
        limit(10**6, 0),
        default=100,
    )
    generation_length: int | None = setting(
        "tokens of a generated target, at most; none: max_target_length", LENGTH, default=None
    )
    num_beams: int = setting(
        "beams of the search for a target; 1: the likeliest token each time", limit(1000), default=1
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalLmSettings(LanguageModelSettings):
    """Settings of one run that trains a model to continue text."""

    sample_prompt: str | None = setting("text that the trained model continues at the end; none: no text", default=None)
    sample_length: int = setting("tokens of that continuation", LENGTH, default=200)
