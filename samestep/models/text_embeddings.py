"""Embed texts by any encoder or decoder of transformers: a vector of length 1 for each text of a micro-batch.

The loss of embeddings compares all samples of a step, so that no micro-batch has one of its own: see
`samestep.contrib.whole_batch`. Texts are padded behind their tokens, queries apart from the other texts, which are longer.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModel, PreTrainedModel
from transformers.masking_utils import eager_mask

from samestep._internals.transformers_models import can_set_attention, recompute_activations, supports_sdpa
from samestep.errors import UsageError, reason
from samestep.models import adapters, cpu_matmul, saved_embeddings, sequences
from samestep.models.causal_lm import choose_config
from samestep.models.pretrained import initial_model
from samestep.models.summed_losses import SummedLosses
from samestep.recipe.task_settings import EmbeddingSettings
from samestep.recipe.tasks.embedding_training import EmbeddingTraining
from samestep.step import noise

HEADS = (
    *("pooler.", "cls.", "lm_head.", "score.", "classifier.", "head.", "decoder.", "vocab_", "mask_predictions."),
    *("discriminator_predictions.", "generator_predictions.", "generator_lm_head."),
)
"""Prefixes of the names of weights that files may have beside those of a body, or may lack."""
LEARNED = ("similarity_scale", "similarity_bias")
"""Parameters of the loss, which are held by the body: logarithm of 1 / temperature, and the bias of siglip."""
BY_SAMPLE = "padded_by_sample"
"""Name of the attention whose dropout is drawn by sample."""


def build_model(recipe: EmbeddingTraining, source: Any = None) -> PreTrainedModel:
    """Build the body of a recipe's model, without heads, in float32.

    Args:
        recipe: decides the shape, or the weights to start from.
        source: with a `tokenizer`, whose tokens the vocabulary must hold; None: the recipe decides.

    Raises:
        UsageError: no such architecture, or weights that cannot be loaded; too few tokens or positions, vectors too short.
    """
    tokenizer, path = getattr(source, "tokenizer", None), adapters.find_start(recipe)[0]
    try:
        if path is None:
            make, values = choose_config(recipe, tokenizer)
            config = make(**values)
        else:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except UsageError:
        raise
    except Exception as error:  # of any kind: network, names, files of others, rules of architectures
        name = f"architecture {recipe.architecture}" if path is None else f"model_name_or_path {path}"
        raise UsageError(f"{name} gives no configuration: {reason(error)}. Give another one") from None
    if recipe.dropout is not None:
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, recipe.dropout)
    try:
        model = AutoModel.from_config(config) if path is None else initial_model(AutoModel, config, path, HEADS)
    except ValueError as error:
        raise UsageError(f"{type(config).__name__} has no body that embeds texts: {reason(error)}") from None
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # a head of its own, which would not be trained
    length, width = getattr(config, "max_position_embeddings", None), config.get_text_config().hidden_size
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    problems = []
    if length is not None and recipe.max_seq_length > length:
        problems.append(
            f"max_seq_length is {recipe.max_seq_length:,}, but the model has {length:,} positions: lower it"
        )
    if tokenizer is not None and len(tokenizer) > num_embeddings:
        problems.append(
            f"the tokenizer has {len(tokenizer):,} tokens, but the model embeds {num_embeddings:,}: give the model's own "
            "tokenizer_name, or a larger vocab_size"
        )
    if recipe.matryoshka_sizes and max(recipe.matryoshka_sizes) > width:
        problems.append(
            f"matryoshka_sizes has {max(recipe.matryoshka_sizes)}, but vectors have {width} numbers: lower it"
        )
    if problems:
        raise UsageError(problems)
    return model


class EmbeddingSums(SummedLosses):
    """Embeds the texts of samples, and holds what the loss of a step learns itself.

    Args:
        model: of transformers, without heads, or peft's model of it.
        pooling: mean, cls or last_token.
        scale, bias: first values of `LEARNED`; None: they are not learned.
    """

    def __init__(self, model: nn.Module, pooling: str, scale: float | None = None, bias: float | None = None):
        super().__init__()
        self.model, self.pooling = model, pooling
        body = self.body
        layers = {type(module).__name__ for module in body.modules()}
        self._no_split_modules = tuple(sorted(layers & set(body._no_split_modules or ())))
        # Of the body, so that all names in a checkpoint begin alike, and what is published loads
        for name, value in zip(LEARNED, (scale, bias), strict=True):
            if value is not None:
                body.register_parameter(name, nn.Parameter(torch.tensor(value, dtype=torch.float64).float()))
        sequences.own_dropout(body)
        self.is_noisy = any(isinstance(module, nn.Dropout) and module.p for module in body.modules())
        if self.is_noisy and can_set_attention(body):
            body.set_attn_implementation(BY_SAMPLE)

    @property
    def body(self) -> PreTrainedModel:
        """The model of transformers, with adapters in it if there are any."""
        return self.model if isinstance(self.model, PreTrainedModel) else self.model.get_base_model()

    @classmethod
    def from_recipe(cls, recipe: EmbeddingTraining, source: Any = None) -> Self:
        model: Any = build_model(recipe, source)
        if recipe.lora_rank is not None:
            model = adapters.add_lora(model, recipe)
        scale = bias = None
        if recipe.learn_temperature:
            scale = -torch.tensor(recipe.temperature, dtype=torch.float64).log().item()
            bias = recipe.similarity_bias if recipe.objective == "siglip" else None
        return cls(model, recipe.pooling, scale, bias)

    @classmethod
    def example(cls, recipe: EmbeddingTraining, num_samples: int) -> dict[str, torch.Tensor | None]:
        length, num_texts = recipe.max_seq_length, num_samples * (1 + recipe.num_negatives)
        return {
            "query_ids": torch.zeros(num_samples, length, dtype=torch.int64),
            "query_lengths": torch.full((num_samples,), length),
            "text_ids": torch.zeros(num_texts, length, dtype=torch.int64),
            "text_lengths": torch.full((num_texts,), length),
            "keys": torch.zeros(num_samples, 1 + recipe.num_negatives, dtype=torch.int64),
            "numbers": torch.arange(num_samples),
        }

    def forward(
        self, query_ids, query_lengths, text_ids, text_lengths, keys, numbers
    ) -> tuple[torch.Tensor, torch.Tensor | tuple[torch.Tensor, ...]]:
        """Embed the texts of S samples; arguments see `TextPairs.collate`.

        Returns:
            floating [1], minus the similarities of pairs, which trials of sizes and kernels take for a loss; and the rows of
                the samples: numbers [S], keys [S, 1 + m], vectors of the queries [S, d], of the other texts [S, 1 + m, d].
                When evaluating the vectors alone, [S, (2 + m) d].
        """
        dropout = next((module for module in self.modules() if isinstance(module, noise.Dropout)), None)
        keys_of_noise = None if dropout is None or not self.training else dropout.noise.samples
        queries, texts = (
            self._embed(ids, lengths, None if dropout is None else dropout.noise, keys_of_noise, first)
            for ids, lengths, first in ((query_ids, query_lengths, 0), (text_ids, text_lengths, 1))
        )
        texts = texts.view(*keys.shape, -1)
        learned = [p for name in LEARNED if (p := getattr(self.body, name, None)) is not None]
        sums = (-(queries * texts[:, 0]).sum() + 0 * sum(p.sum() for p in learned))[None]
        if not self.training:
            return sums, torch.cat([queries[:, None], texts], 1).flatten(1)
        return sums, (numbers, keys, queries, texts)

    def _embed(self, ids, lengths, own_noise, samples, first: int) -> torch.Tensor:
        """Embed texts [n, T], as many for each sample, whose noise is that of text number `first` of their sample and so on."""
        with _noise_of_texts(own_noise, samples, len(ids), first):
            mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
            options = {"use_cache": False} if hasattr(self.body.config, "use_cache") else {}
            hidden = self.body(input_ids=ids, attention_mask=mask.long(), **options).last_hidden_state
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        if self.pooling == "mean":
            pooled = (hidden * mask[..., None]).sum(1) / lengths[:, None]
        else:
            place = lengths - 1 if self.pooling == "last_token" else torch.zeros_like(lengths)
            pooled = hidden[torch.arange(len(ids), device=ids.device), place]
        return F.normalize(pooled, dim=-1)

    def kernel_candidates(
        self, device: torch.device, mixed_precision: str, settings: EmbeddingSettings
    ) -> dict[str, Callable[[], object]]:
        body, names = self.body, [settings.attn_implementation or "sdpa"]
        if not can_set_attention(body) or self.is_noisy or not supports_sdpa(body):
            candidates: dict[str, Callable[[], object]] = {"padded": lambda: None}
        else:
            candidates = {name: partial(body.set_attn_implementation, name) for name in names}
        return cpu_matmul.add_onednn(candidates, body, device, mixed_precision)

    def recompute_activations(self) -> None:
        if not self.body.supports_gradient_checkpointing:
            super().recompute_activations()
        recompute_activations(self.body, {"use_reentrant": False, "context_fn": self._keep_noise})

    def _keep_noise(self) -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
        """Return contexts of a layer's forward and of its recomputation, when the noise may be that of other texts."""
        dropout = next((module for module in self.modules() if isinstance(module, noise.Dropout)), None)
        if dropout is None:
            return contextlib.nullcontext(), contextlib.nullcontext()
        return contextlib.nullcontext(), _hold(dropout.noise, dropout.noise.samples, dropout.noise.rows)

    def save(self, *arguments: Any) -> str:
        """Save what was trained; see `saved_embeddings.save`."""
        return saved_embeddings.save(self, *arguments)


@contextlib.contextmanager
def _hold(own_noise: noise.Noise, samples: torch.Tensor | None, rows: dict) -> Iterator[None]:
    """Let the noise be that of these samples and rows within this context."""
    kept = own_noise.samples, own_noise.rows
    own_noise.samples, own_noise.rows = samples, rows
    try:
        yield
    finally:
        own_noise.samples, own_noise.rows = kept


def _noise_of_texts(
    own_noise: noise.Noise | None, samples: torch.Tensor | None, num_texts: int, first: int
) -> contextlib.AbstractContextManager:
    """Let noise be drawn by text: of text c of a sample, by the sample's key and c; samples without texts: any noise."""
    if own_noise is None or samples is None or not len(samples):
        return contextlib.nullcontext()
    number = torch.arange(num_texts // len(samples), device=samples.device)
    return _hold(own_noise, noise.mix(samples[:, None] + first + number).flatten(), {})


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Compute attention by plain products, [S, heads, T, d] -> [S, T, heads, d], with the module's own dropout by sample."""
    if softcap is not None or s_aux is not None:
        raise UsageError(
            f"{type(module).__name__} has soft caps or sinks, which are not known here with dropout: set dropout to 0"
        )
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is not None:
        scores = scores + attention_mask
    p = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    if dropout and module.training:
        own = next(m for name in ("attn_dropout", "dropout") if isinstance(m := getattr(module, name, None), nn.Module))
        p = own(p)
    return (p @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(BY_SAMPLE, _attend)
AttentionMaskInterface.register(BY_SAMPLE, eager_mask)
