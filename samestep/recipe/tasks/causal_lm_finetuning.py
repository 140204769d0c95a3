"""Recipes that fine-tune a causal language model on conversations or preferences."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from samestep.errors import nearest
from samestep.recipe.reading import format_value
from samestep.recipe.recipe import MAX_NAMES, Parts, register
from samestep.recipe.rules import Rule, each, rows
from samestep.recipe.settings import (
    FRACTION,
    LAYERS,
    LENGTH,
    NOT_NEGATIVE,
    POSITIVE,
    VOCABULARY,
    WIDTH,
    choice,
    limit,
    setting,
)
from samestep.recipe.tasks.conversation_images import IMAGE_RULES, IMAGE_SHAPE
from samestep.recipe.tasks.decoder import (
    SHAPE,
    WITHOUT_ADAPTERS,
    ExpertsRecipe,
    list_adapter_rules,
    list_decoder_rules,
    list_shape_rules,
)
from samestep.recipe.tasks.streamed import StreamedTexts

WEIGHTS = (
    "must be numbers greater than 0, up to 1,000",
    lambda values: len(values) > 0 and all(0 < value <= 1000 for value in values),
)
COLUMNS = {
    "turns": ("messages", "conversations", "conversation"),
    "question": ("prompt", "instruction", "question", "query"),
    "context": ("input", "context"),
    "answer": ("completion", "output", "response", "answer"),
    "pair": ("chosen", "rejected"),
    "text": ("text",),
    "system": ("system", "system_prompt", "system_message"),
    "history": ("history",),
    "tools": ("tools",),
    "label": ("label",),
}
"""Contents of a column of conversations -> its names."""
UNUSED = "unused"
"""Name in `columns` of a column that is not read."""
DRAWN = ("builtin/drawn_chats", "builtin/drawn_pairs", "builtin/drawn_images")
"""Datasets of conversations that are drawn: for fine-tuning by next tokens, by pairs, with images."""
DRAWN_SIZES = ("num_train_samples", "num_validation_samples")
"""Fields that say how many of them are drawn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalLmFineTuning(StreamedTexts, ExpertsRecipe):
    """Fine-tuning a causal language model: all of it or adapters (LoRA), on conversations or on preferences."""

    extra: ClassVar[str | None] = "text"

    # Optimizer
    optimizer: str = setting(
        "adamw, or adamw_8bit: its moments are rounded to 8 bits in blocks of 256, so it is another optimizer than AdamW. 2 "
        "bytes per trained parameter instead of 8",
        choice("adamw", "adamw_8bit"),
    )

    # Data
    train_file: tuple[str, ...] | None = setting("conversations or pairs: jsonl, csv, parquet; globs", decides=False)
    validation_file: tuple[str, ...] | None = setting("held-out ones; null: validation_fraction", decides=False)
    dataset_name: tuple[str, ...] | None = setting(
        f"{', '.join(DRAWN)}, builtin/doctests, datasets of the hub (NAME, NAME:CONFIG, NAME:CONFIG:SPLIT), or data files",
        decides=False,
    )
    dataset_config_name: str | None = setting(
        "configuration of the hub dataset, or level of drawn data: easy, medium or hard; null with several datasets",
        decides=False,
    )
    columns: tuple[str, ...] | None = setting(
        "NAME=COLUMN for columns that are called otherwise, such as messages=chat,prompt=ask; unused=COLUMN leaves one out; "
        "null: all have known names",
        decides=False,
    )
    mixture_weights: tuple[float, ...] | None = setting(
        "passes over each source in an epoch, a source being an entry of dataset_name or train_file. 2 uses each sample twice, "
        "0.5 half of them, the next epoch the others. null: each sample once",
        WEIGHTS,
    )
    validation_fraction: float = setting(
        "fraction of the samples held out, drawn by the seed; not used with validation_file or builtin data", FRACTION
    )
    num_train_samples: int | None = setting("samples to draw; null with other data", POSITIVE, decides=False)
    num_validation_samples: int | None = setting(
        "held-out samples to draw beside them; null with other data", POSITIVE, decides=False
    )
    images: bool = setting("whether rows may hold images, for a model of images and text, and its processor")
    chat_template: str | None = setting(
        "file of a chat template (Jinja), chatml, or tulu (roles as text, for base models). null: the tokenizer's, and chatml "
        "for a tokenizer that is trained",
        decides=False,
    )
    train_on: str = setting(
        "tokens that are predicted: assistant (all turns of the assistant; beside a prompt the completion), completions (the "
        "last answer alone), or all (of the sample)",
        choice("completions", "assistant", "all"),
    )
    max_seq_length: int = setting("tokens of a sequence", limit(2**24, 2))
    truncation: str = setting("of longer sequences: cut (their ends) or drop (leave them out)", choice("cut", "drop"))

    # Objective
    objective: str = setting(
        "sft (next tokens), or of pairs: dpo (2305.18290), orpo (2403.07691), simpo (2405.14734), reward (Bradley-Terry)",
        choice("sft", "dpo", "orpo", "simpo", "reward"),
    )
    loss_weighting: str = setting("of sft: token (each counts the same) or sample", choice("token", "sample"))
    preference_beta: float = setting("beta of dpo and simpo", POSITIVE)
    preference_margin: float = setting("gamma of simpo: log-odds by which the chosen answer should lead", NOT_NEGATIVE)
    preference_weight: float = setting(
        "lambda of orpo: weight of the odds ratio beside the loss of tokens", NOT_NEGATIVE
    )
    sft_loss_weight: float = setting("weight of the loss of chosen tokens beside dpo; 0: none", NOT_NEGATIVE)

    # Model
    tokenizer_name: str | None = setting(
        "tokenizer to load; null: that of model_name_or_path, or one trained on the samples", decides=False
    )
    vocab_size: int | None = setting(
        "vocabulary: of the tokenizer to train, or rows of the embedding; null: those of the model or of tokenizer_name",
        VOCABULARY,
    )
    model_name_or_path: str | None = setting(
        "weights to start from, which decide the shape; null: random, of the shape below", decides=False
    )
    architecture: str | None = setting("model_type of transformers: llama, qwen3, gpt2, ...; null with weights")
    hidden_size: int | None = setting("width; null with weights, as all that follow", WIDTH)
    num_hidden_layers: int | None = setting("layers", LAYERS)
    num_attention_heads: int | None = setting("heads; divides hidden_size", WIDTH)
    num_key_value_heads: int | None = setting("heads of keys and values; null: num_attention_heads", WIDTH)
    intermediate_size: int | None = setting("width of the feed-forward layer", limit(2**20))
    max_position_embeddings: int | None = setting("positions; at least max_seq_length", LENGTH)
    tie_word_embeddings: bool | None = setting("whether the head is the embedding's matrix")
    initializer_range: float | None = setting("standard deviation of the initial weights", POSITIVE)
    image_size: int | None = setting("pixels of a side of images; null with weights, or without images", limit(2**12))
    image_patch_size: int | None = setting("pixels of a side of what is one token of an image", limit(2**12))
    num_image_layers: int | None = setting("layers of the tower of images, as wide as the language model", LAYERS)
    base_quantization: str | None = setting(
        "nf4: the linear layers below adapters in 4 bits, with double quantisation (QLoRA, 2305.14314), so another base; null: "
        "as they are",
        choice("nf4"),
    )

    # Adapters
    lora_rank: int | None = setting(
        "rank of the adapters that are trained (LoRA, 2106.09685); null: all weights", WIDTH
    )
    lora_alpha: float | None = setting("adapters are scaled by lora_alpha / lora_rank; null without adapters", POSITIVE)
    lora_dropout: float = setting("dropout before adapters, drawn by sample", FRACTION)
    lora_targets: tuple[str, ...] = setting("all-linear, or names of the layers that get adapters")
    use_rslora: bool = setting("scale adapters by lora_alpha / sqrt(lora_rank) (2312.03732)")
    use_dora: bool = setting("train the norms of the weights beside the adapters (DoRA, 2402.09353)")
    modules_to_save: tuple[str, ...] | None = setting("names of modules that are trained whole beside adapters")

    SHAPE: ClassVar[tuple[str, ...]] = SHAPE
    """Fields of `shape`."""

    rules = rows(
        Rule(
            lambda f: f.streaming and f.objective == "dpo",
            "objective is dpo, but streaming is true, and a reference model scores all pairs before the training",
            "set objective to orpo or simpo, or streaming to false",
        ),
        Rule(
            lambda f: f.streaming and f.images,
            "images is true, but streaming is true, and only texts are streamed",
            "set streaming to false",
        ),
        Rule(
            lambda f: f.optimizer == "adamw_8bit" and f.accumulation == "optimizer",
            "accumulation is optimizer, but optimizer is adamw_8bit, whose moments would be rounded in every micro-batch",
            "set accumulation to gradient, or optimizer to adamw",
        ),
        # Data
        *each(
            DRAWN_SIZES,
            lambda name: Rule(
                lambda f: f[name] is None and ", ".join(find_drawn(f.dataset_name)),
                f"{name} is None, but with {{found}} it must be a number of samples",
                "set it to a number of samples",
            ),
        ),
        *each(
            DRAWN_SIZES,
            lambda name: Rule(
                lambda f: (
                    f[name] is not None
                    and not find_drawn(f.dataset_name)
                    and (", ".join(f.dataset_name or ()) or "files")
                ),
                f"{name} is {{f[{name}]}}, but with {{found}} it must be null",
                "set it to null",
            ),
        ),
        Rule(
            lambda f: f.dataset_config_name is not None and len(f.dataset_name or ()) > 1 and len(f.dataset_name),
            "dataset_config_name is {f.dataset_config_name}, but dataset_name names {found} datasets",
            "write NAME:CONFIG, and set dataset_config_name to null",
        ),
        Rule(
            lambda f: (f.dataset_name or f.mixture_weights) and next(iter(_find_repeated(f.sources)), None),
            "{found} is named twice",
            "name it once, and set mixture_weights",
        ),
        Rule(
            lambda f: (
                f.mixture_weights is not None
                and len(f.mixture_weights) != len(f.sources)
                and (
                    f"{len(f.mixture_weights)} numbers for {len(f.sources)} sources "
                    f"({', '.join(f.sources[:MAX_NAMES])}{', ...' if len(f.sources) > MAX_NAMES else ''})"
                )
            ),
            "mixture_weights has {found}",
            "give one each",
        ),
        Rule(
            lambda f: f.loss_weighting == "sample" and f.objective != "sft",
            "loss_weighting is sample, but objective is {f.objective}, whose pairs count the same anyway",
            "set it to token",
        ),
        Rule(
            lambda f: f.sft_loss_weight and f.objective != "dpo",
            "sft_loss_weight is {f.sft_loss_weight}, but objective is {f.objective}",
            "set it to 0, or objective to dpo",
        ),
        Rule(
            lambda f: f.train_on == "all" and f.objective != "sft",
            "train_on is all, but objective is {f.objective}, which compares answers",
            "set it to completions or assistant",
        ),
        *IMAGE_RULES,
        # Shape
        *list_shape_rules(SHAPE, ("num_key_value_heads",)),
        *list_decoder_rules("max_seq_length"),
        # Adapters
        *list_adapter_rules(WITHOUT_ADAPTERS),
        Rule(
            lambda f: f.lora_rank is not None and f.use_dora and f.base_quantization is not None,
            "use_dora is true, but base_quantization is {f.base_quantization}, whose weights have no norms",
            "set use_dora to false, or base_quantization to null",
        ),
    )

    def decisive_fields(self) -> dict[str, Any]:
        fields = super().decisive_fields()
        if not self.images:  # fingerprints of earlier versions, which had none
            for name in ("images", *IMAGE_SHAPE):
                del fields[name]
        return fields

    def problems(self) -> list[str]:
        kind = DRAWN[2 if self.images else self.objective != "sft"]
        problems = [
            f"objective is {self.objective}, but dataset_name is {name}, which has no such samples: set dataset_name to "
            f"{kind}, or another objective"
            for name in find_drawn(self.dataset_name)
            if name.partition(":")[0] != kind
        ]
        return super().problems() + problems + self._problems_of_columns()

    def _problems_of_columns(self) -> list[str]:
        problems, targets = [], [name for names in COLUMNS.values() for name in names]
        pairs = [word.partition("=") for words in self.columns or () for word in words.split(",")]
        for target, equals, name in pairs:
            if not (target and equals and name):
                problems.append(f"columns has {format_value(target + equals + name)}: write NAME=COLUMN")
            elif target not in (*targets, UNUSED):
                problems.append(
                    f"columns maps {name} to {target[:60]}, which is not read: {nearest(target[:60], targets)}"
                )
        for place, kind in ((0, "to two columns"), (2, "to two names")):
            twice = _find_repeated([pair[place] for pair in pairs if pair[place] != UNUSED])
            problems += [f"columns maps {name} {kind}: leave one out" for name in dict.fromkeys(twice)]
        return problems

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of samples, as `mixture_weights` counts them."""
        return self.dataset_name or self.train_file or ()

    @property
    def column_names(self) -> dict[str, str]:
        """Name of a column in the data -> what `columns` calls it."""
        pairs = [word.partition("=") for words in self.columns or () for word in words.split(",")]
        return {name: target for target, _, name in pairs}

    @property
    def loss_weights(self) -> dict[str, float]:
        """Name and weight of each loss term: means over tokens (lm, sft), over pairs (preference, odds)."""
        terms = {"sft": {"lm": 1.0}, "orpo": {"sft": 1.0, "odds": self.preference_weight}}
        weights = terms.get(self.objective, {"preference": 1.0})
        return weights | ({"sft": self.sft_loss_weight} if self.sft_loss_weight else {})

    @property
    def model_in_words(self) -> str:
        method = "" if self.lora_rank is None else " by LoRA" if self.base_quantization is None else " by QLoRA"
        return super().model_in_words + method + ("" if self.objective == "sft" else f" ({self.objective})")

    @property
    def is_planned(self) -> bool:
        return super().is_planned and not self.images

    @property
    def reads_shards(self) -> bool:
        """Whether processes that divide the weights may read their own rows only of the files to start from."""
        needs_whole = self.use_dora or self.modules_to_save or self.base_quantization is not None or self.images
        return self.model_name_or_path is not None and self.objective not in ("reward", "dpo") and not needs_whole

    @property
    def shape(self) -> dict[str, Any]:
        """The shape of a model with random weights, as transformers' configuration of `architecture` takes it."""
        return {name: getattr(self, name) for name in self.SHAPE}

    @property
    def small_shape(self) -> dict[str, Any]:
        small: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        small |= {"intermediate_size": 128}
        if self.model_name_or_path is None:
            assert self.hidden_size is not None  # as no checkpoint gives it
            assert self.num_hidden_layers is not None
            small = small if self.hidden_size > 64 else {}
            if self.num_key_value_heads is None:
                small.pop("num_key_value_heads", None)
            return small | {"num_hidden_layers": min(2, self.num_hidden_layers)}
        small |= {"model_name_or_path": None, "tokenizer_name": self.tokenizer_name or self.model_name_or_path}
        small |= {"router_loss": None, "router_loss_weight": None, "router_z_loss_weight": 0.0}
        small |= {"architecture": "llama", "num_hidden_layers": 2, "max_position_embeddings": self.max_seq_length}
        return small | {"tie_word_embeddings": True, "initializer_range": 0.02}


register(
    "causal_lm_finetuning",
    CausalLmFineTuning,
    Parts(
        settings="samestep.recipe.task_settings:CausalLmFineTuningSettings",
        data="samestep.data.conversations:build",
        model="samestep.models.causal_lm:CausalLmSums",
        shape="stepplan.memory:causal_lm_finetuning",
        script="finetune_causal_lm.py",
        pipeline_tag="text-generation",
    ),
)


def find_drawn(names: Any) -> list[str]:
    """Find those names of datasets, one or several, whose samples are drawn.

    >>> find_drawn("builtin/drawn_chats"), find_drawn(["a/b", "builtin/drawn_chats:hard"]), find_drawn(None)
    (['builtin/drawn_chats'], ['builtin/drawn_chats:hard'], [])
    """
    entries = [names] if isinstance(names, str) else names or []
    return [name for name in entries if isinstance(name, str) and name.partition(":")[0] in DRAWN]


def _find_repeated(names: Sequence[str]) -> list[str]:
    """Find the names that stand behind an equal one.

    >>> _find_repeated(["a", "b", "a", "a"])
    ['a', 'a']
    """
    return [name for number, name in enumerate(names) if name in names[:number]]
