"""Fine-tune a causal language model of transformers on sequences without padding: losses summed over a micro-batch."""

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from samestep._internals.torch_tracing import is_fake
from samestep._internals.transformers_models import (
    attention_kernel,
    recompute_activations,
    set_text_attention,
    supports_sdpa,
)
from samestep.cut.layout import round_up
from samestep.errors import UsageError, reason
from samestep.models import (
    adapters,
    cpu_matmul,
    freezing,
    packing,
    quantization,
    saved_causal_lm,
    sequences,
    stop_tokens,
)
from samestep.models.pretrained import causal_attention, initial_model
from samestep.models.sequences import Sequences
from samestep.models.summed_losses import SummedLosses
from samestep.recipe import hub
from samestep.recipe.task_settings import LanguageModelSettings
from samestep.recipe.tasks.causal_lm_finetuning import CausalLmFineTuning
from samestep.step import losses, noise
from samestep.step.log_probabilities import count_tokens, sequence_logps

PREFERENCES = "samestep.contrib.preferences"
"""Module of the losses of pairs of sequences, of all objectives but sft."""
IMAGES = "samestep.models.image_text"
"""Module of models of images and text."""
NF4 = "samestep.contrib.nf4"
"""Module that rounds a base to 4 bits."""
SHAPE = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("max_position_embeddings", "tie_word_embeddings", "initializer_range"),
)
"""Fields of a recipe that give an `architecture` its shape."""
OTHER_NAMES = {"intermediate_size": "n_inner"}
"""Field -> its name in configs that have no such field, and no alias of it."""


def build_model(recipe: Any, source: Any = None, shape: Mapping[str, Any] | None = None) -> PreTrainedModel:
    """Build the recipe's model: of its `architecture` with random weights, or `model_name_or_path` (of an adapter its base), in
    float32.

    A reward model has a head of one score instead of tokens, with random weights if the file has none.

    Args:
        recipe: see `CausalLmSums`.
        source: with a `tokenizer`, whose tokens the vocabulary must hold; None: the recipe decides.
        shape: fields of a configuration of transformers, of random weights; None: the recipe decides.

    Raises:
        UsageError: no such architecture, or it has no such field; the weights cannot be loaded, or the vocabulary is too small.
    """
    tokenizer, is_reward = getattr(source, "tokenizer", None), recipe.objective == "reward"
    model_class = AutoModelForImageTextToText if recipe.images else AutoModelForCausalLM
    model_class = AutoModelForSequenceClassification if is_reward else model_class
    head = {"num_labels": 1} if is_reward else {}
    if shape is not None or recipe.model_name_or_path is None:
        choose = importlib.import_module(IMAGES).choose_config if recipe.images else choose_config
        make, values = choose(recipe, tokenizer) if shape is None else (AutoConfig.for_model, shape)
        try:
            config = make(**values, **head)
            model = model_class.from_config(config)
        except Exception as error:  # of any kind: each architecture has its own rules
            raise UsageError(
                f"architecture {recipe.architecture} cannot be made of the recipe's shape: {reason(error)}"
            ) from None
    else:
        path = adapters.find_start(recipe)[0]
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False, **head)
        except Exception as error:  # of any kind: network, names, files of others
            name, remedy = recipe.model_name_or_path, "Give a folder, or a name of the hub"
            if path != name:
                remedy = f"It is an adapter of {path}: if that is a folder, put it, or a link to it, at {name}/base"
            remedy += hub.describe_way_out(path)
            raise UsageError(f"model_name_or_path {name} has no config: {reason(error)}. {remedy}") from None
        model = initial_model(model_class, config, path, ("score.", "lm_head.") if is_reward else ())
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if length is not None and recipe.max_seq_length > length:
        raise UsageError(
            f"max_seq_length is {recipe.max_seq_length:,}, but the model has {length:,} positions: lower it to at most that"
        )
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    if tokenizer is not None and len(tokenizer) > num_embeddings:
        raise UsageError(
            f"the tokenizer has {len(tokenizer):,} tokens, but the model embeds {num_embeddings:,}: give the model's own "
            "tokenizer_name, or a larger vocab_size"
        )
    if getattr(recipe, "freeze", None) and recipe.lora_rank is None:
        freezing.freeze_modules(model, recipe.freeze)
    return model


def choose_config(
    recipe: Any, tokenizer: Any, architecture: str | None = None
) -> tuple[type[PreTrainedConfig], dict[str, Any]]:
    """Return the class of an architecture's config (None: the recipe's), and its values for the shape of a recipe, without
    fields that are None."""
    try:
        default = AutoConfig.for_model(architecture or recipe.architecture)
    except ValueError:
        raise UsageError(
            f"architecture {recipe.architecture} is no model_type that transformers knows, such as llama"
        ) from None
    fields = {name: getattr(recipe, name) for name in SHAPE if getattr(recipe, name) is not None}
    if hasattr(default, "num_key_value_heads") and "num_attention_heads" in fields:
        fields.setdefault("num_key_value_heads", recipe.num_attention_heads)
    values = {}
    for name, value in fields.items():
        own = name if hasattr(default, name) else OTHER_NAMES.get(name, name)
        if hasattr(default, own):
            values[own] = value
        elif (name, value) != ("num_key_value_heads", fields.get("num_attention_heads")):
            raise UsageError(
                f"{name} is {value}, but architecture {recipe.architecture} has no such field: set it to null"
            )
    is_settable = hasattr(default, "head_dim") and not isinstance(getattr(type(default), "head_dim", None), property)
    if is_settable and {"hidden_size", "num_attention_heads"} <= fields.keys():
        values["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    ids = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    vocab_size = recipe.vocab_size if tokenizer is None else max(recipe.vocab_size or 0, len(tokenizer))
    return type(default), {**values, **ids, "vocab_size": vocab_size}


class CausalLmSums(SummedLosses):
    """Sums an objective's losses over sequences of tokens, or over pairs of them (see `contrib.preferences`).

    For sft that is the cross-entropy of trained tokens, each divided by its sequence's number of them if samples count alike.
    Sequences lie end to end in a row, without padding, if the model's attention can be computed inside them (`sequences`) and
    nothing of one reaches the next (`packing.probe`); else they are padded, each in a row of its own.

    Args:
        model: of transformers, or peft's model of it.
        objective: sft, dpo, orpo, simpo or reward.
        loss_weighting: token or sample, of sft.
        terms: names of the loss terms, see `contrib.preferences.sum_terms`.
        beta, margin: of the objectives of pairs that have them.

    Attributes:
        is_padded: sequences are padded.
        notes: lines for the log: why sequences are padded, what else is unlike other models.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: str = "sft",
        loss_weighting: str = "token",
        terms: Sequence[str] = ("lm",),
        beta: float | None = None,
        margin: float | None = None,
    ):
        super().__init__()
        self.model, self.objective, self.loss_weighting = model, objective, loss_weighting
        self.terms, self.beta, self.margin = tuple(terms), beta, margin
        causal_lm = self.causal_lm
        layers = {type(module).__name__ for module in causal_lm.modules()}
        self._no_split_modules = tuple(sorted(layers & set(causal_lm._no_split_modules or ())))
        self.notes, self.is_padded = [], False
        self.scale, self.softcap = _find_scale(causal_lm)
        name = type(causal_lm).__name__
        if problem := self.compute_in_rows():
            self.is_padded = True
            self.notes.append(f"{name}: {problem}, so each sequence is computed in a padded row of its own")
        noisy = _find_noise_of_functions(causal_lm)
        if not self.is_padded:
            sequences.own_dropout(causal_lm)
            noisy = [field for field in noisy if field != "attention_dropout"]
        if noisy:
            self.notes.append(
                f"{', '.join(noisy)} of {name}: draws torch's own noise, per process and micro-batch, so that another layout's "
                "losses differ by it"
            )
        if objective != "reward" and not is_fake(next(model.parameters())):
            self._check_head()

    def compute_in_rows(self) -> str | None:
        """Let the model's attention stay inside the sequences of a row; say why it cannot, and is as it was."""
        return packing.stay_apart(self.causal_lm, packing.probe)

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The model of transformers, with adapters in it if there are any."""
        return self.model if isinstance(self.model, PreTrainedModel) else self.model.get_base_model()

    @classmethod
    def from_recipe(cls, recipe: Any, source: Any = None, shape: Mapping[str, Any] | None = None) -> Self:
        """Build the model of a recipe.

        Args:
            recipe: with model_name_or_path, or architecture, vocab_size and the fields of `SHAPE`; objective, loss_weighting,
                loss_weights, preference_beta, preference_margin; lora_rank (None: all weights are trained) and the fields of
                `adapters.add_lora`; base_quantization, nf4 or None.
            source: with a tokenizer; None: the recipe decides.
            shape: as of `build_model`.
        """
        if recipe.images:
            cls = importlib.import_module(IMAGES).with_blank(source)
        model, notes = build_model(recipe, source, shape), []
        stop_tokens.add(model, source)
        if recipe.base_quantization is not None:
            notes.append(importlib.import_module(NF4).quantize_base(model, recipe.modules_to_save))
        if recipe.lora_rank is not None:
            model = adapters.add_lora(model, recipe)
            dtype = adapters.find_base_dtype(recipe)
            if dtype in (torch.bfloat16, torch.float16) and not recipe.use_dora:
                quantization.hold_base(model, dtype)
        objective, terms = recipe.objective, tuple(recipe.loss_weights)
        sums = cls(model, objective, recipe.loss_weighting, terms, recipe.preference_beta, recipe.preference_margin)
        sums.notes = [*sums.notes, *notes]
        return sums

    @classmethod
    def example(cls, recipe: CausalLmFineTuning, num_samples: int) -> dict[str, torch.Tensor | None]:
        length, num_sequences = recipe.max_seq_length, num_samples * (1 if recipe.objective == "sft" else 2)
        place = torch.arange(length * num_sequences)
        label_index = place.view(num_sequences, length)[:, :-1].flatten()
        return {
            "input_ids": torch.zeros(1, len(place), dtype=torch.int64),
            "position_ids": (place % length)[None],
            "ends": torch.arange(num_sequences + 1, dtype=torch.int32) * length,
            "labels": torch.zeros_like(label_index),
            "label_index": label_index,
            "label_sequence": label_index // length,
            "reference": torch.zeros(num_sequences),
        }

    def forward(
        self, input_ids, position_ids, ends, labels, label_index, label_sequence, reference=None, **images
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum each term's loss, and count correct predictions, when evaluating, or pairs ranked rightly; both [terms]. Without
        a gradient, give the margins of pairs, [pairs, 1], instead of their number.

        Args:
            input_ids, position_ids: int64 [1, n], all sequences end to end.
            ends: int32 [Q + 1], 0 and the end of each sequence.
            labels, label_index, label_sequence: int64 [m]: of each trained token, the token, the place in the row of the token
                before it, and the number of its sequence.
            reference: float32 [Q], log-probability of each sequence's trained tokens by the reference model.
            images: what `hidden` takes of models of images.
        """
        hidden, num_sequences = self.hidden(input_ids, position_ids, ends, **images), len(ends) - 1
        num_trained = count_tokens(label_sequence, num_sequences)
        if self.objective != "sft":
            if self.objective == "reward":
                values = self.causal_lm.score(hidden[(ends[1:] - 1).clamp(min=0)]).squeeze(1)
            else:
                values = self._sequence_logps(hidden[label_index], labels, label_sequence, num_sequences)
            options = {"beta": self.beta, "margin": self.margin}
            preferences = importlib.import_module(PREFERENCES)
            sums, correct, margins = preferences.sum_terms(
                self.objective, self.terms, values, num_trained, reference, **options
            )
            return sums, correct if torch.is_grad_enabled() else margins[:, None]
        hidden, scales = hidden[label_index], None
        if self.loss_weighting == "sample":
            scales = 1 / num_trained[label_sequence].to(torch.promote_types(hidden.dtype, torch.float32))
        loss_sum, num_correct = self.cross_entropy(hidden, labels, scales)
        return torch.stack([loss_sum]), num_correct[None]

    def hidden(self, input_ids: torch.Tensor, position_ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Compute the last hidden states of sequences that lie end to end, [n, width]; arguments as of `forward`."""
        num_tokens = input_ids.shape[1]
        num_spare = round_up(num_tokens + 1, 6) - num_tokens  # at least one, and few sizes of rows in a run
        input_ids, position_ids = (F.pad(x, (0, num_spare)) for x in (input_ids, position_ids))
        row = Sequences(ends, input_ids.shape[1], num_tokens)
        self._name_rows(row, ends, position_ids)
        if self.is_padded:
            return packing.padded_hidden(self.causal_lm, input_ids, row)
        return packing.row_hidden(self.causal_lm, input_ids, position_ids, row)[:num_tokens]

    def locate_targets(self, micro_batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Locate the trained tokens of a micro-batch: the rows in layers of the tokens before them, int64 [m], and the number
        of each one's sequence; and count the sequences. Arguments as of `forward`."""
        place, ends = micro_batch["label_index"], micro_batch["ends"]
        if self.is_padded:
            place = packing.find_padded(place, ends, micro_batch["input_ids"].shape[1])
        return place, micro_batch["label_sequence"], len(ends) - 1

    def _name_rows(self, row: Sequences, ends: torch.Tensor, position_ids: torch.Tensor) -> None:
        """Tell the noise which rows of the tensors are which tokens of which samples. A pair's sequences are one sample."""
        dropout = next((module for module in self.modules() if isinstance(module, noise.Dropout)), None)
        if dropout is None or not self.training:
            return
        num_sequences, per_sample = len(ends) - 1, 1 if self.objective == "sft" else 2
        place = torch.arange(row.num_tokens, device=ends.device)
        sequence = torch.searchsorted(ends[1:], place.to(ends.dtype), right=True)  # Q for tokens of none
        sample = sequence // per_sample
        # A token's place in its sample, from the sample's first token
        firsts = ends[:-1:per_sample].long() if num_sequences else ends.long()
        places = place - firsts[sample.clamp(max=len(firsts) - 1)]
        shape, num_samples = (1, row.num_tokens), num_sequences // per_sample
        dropout.noise.set_rows(shape, sample, places, num_samples)
        if self.is_padded:
            rows = row.rows()
            dropout.noise.rows[tuple(rows.source.shape)] = dropout.noise.rows[shape][0, rows.source]

    def cross_entropy(
        self, hidden: torch.Tensor, labels: torch.Tensor, scales: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the cross-entropy of tokens, and count those with the largest logit, see `losses.linear_cross_entropy`.

        Args:
            hidden: last hidden states [m, width].
            labels: int64 [m].
            scales: factor of each token's cross-entropy, floating [m]; None: 1.
        """
        if self._has_plain_head:
            weight = self.causal_lm.get_output_embeddings().weight
            num_spare = round_up(len(labels), 6) - len(labels)  # few sizes in a run, as of rows
            hidden, labels = (
                F.pad(self._scale(hidden), (0, 0, 0, num_spare)),
                F.pad(labels, (0, num_spare), value=losses.IGNORED),
            )
            scales = None if scales is None else F.pad(scales, (0, num_spare))
            return losses.linear_cross_entropy(hidden, weight, labels, losses.choose_max_logits(weight), scales)
        parts = [
            (-log_p if scales is None else -log_p * scales[chunk], is_largest)
            for chunk, log_p, is_largest in self._log_probabilities(hidden, labels)
        ]
        return torch.cat([part[0] for part in parts]).sum(), torch.cat([part[1] for part in parts]).sum()

    def sequence_log_probabilities(
        self, input_ids, position_ids, ends, labels, label_index, label_sequence, reference=None
    ) -> torch.Tensor:
        """Compute the summed log-probability of each sequence's trained tokens, [Q] in float32 or wider; see `forward`."""
        hidden = self.hidden(input_ids, position_ids, ends)[label_index]
        return self._sequence_logps(hidden, labels, label_sequence, len(ends) - 1)

    def _sequence_logps(
        self, hidden: torch.Tensor, labels: torch.Tensor, label_sequence: torch.Tensor, num_sequences: int
    ) -> torch.Tensor:
        if self._has_plain_head:
            weight = self.causal_lm.get_output_embeddings().weight
            options = num_sequences, losses.choose_max_logits(weight)
            return sequence_logps(self._scale(hidden), weight, labels, label_sequence, *options)
        log_p = torch.cat([log_p for _, log_p, _ in self._log_probabilities(hidden, labels)])
        sums = torch.zeros(num_sequences, dtype=torch.float64, device=log_p.device)
        return sums.index_add(0, label_sequence, log_p.double()).to(log_p.dtype)

    def _scale(self, values: torch.Tensor) -> torch.Tensor:
        return values if self.scale == 1 else values * self.scale

    @property
    def _has_plain_head(self) -> bool:
        """Tell whether logits are a multiple of hidden states times a matrix."""
        head = self.causal_lm.get_output_embeddings()
        return type(head) in (nn.Linear, quantization.HalfLinear) and head.bias is None and self.softcap is None

    def _log_probabilities(
        self, hidden: torch.Tensor, labels: torch.Tensor
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield of each chunk of labels, as logits exist in chunks only: its place, each label's log-probability, in float32
        or wider, and whether its logit is the largest."""
        weight = self.causal_lm.get_output_embeddings().weight
        size = max(1, losses.choose_max_logits(weight) // len(weight))
        for first in range(0, max(1, len(labels)), size):
            chunk = slice(first, first + size)
            yield chunk, *checkpoint(self._head, hidden[chunk], labels[chunk], use_reentrant=False)

    def _head(self, hidden: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._scale(self.causal_lm.get_output_embeddings()(hidden))
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        log_p = F.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
        return log_p.gather(1, labels[:, None]).squeeze(1), logits.argmax(-1) == labels

    @torch.no_grad()
    def _check_head(self) -> None:
        """Compare the head of `_head` with the model's own.

        Raises:
            UsageError: they differ.
        """
        model, was_training = self.causal_lm, self.causal_lm.training
        model.eval()
        input_ids = torch.arange(4, device=model.device)
        ends = torch.tensor([0, len(input_ids)], dtype=torch.int32, device=model.device)
        log_p, _ = self._head(self.hidden(input_ids[None], input_ids[None], ends), input_ids)
        with self.own_attention():
            logits = model(input_ids=input_ids[None], use_cache=False).logits[0]
        own = logits.log_softmax(-1).gather(1, input_ids[:, None]).squeeze(1)
        model.train(was_training)
        if not torch.allclose(log_p, own, rtol=1e-3, atol=1e-4):
            raise UsageError(
                f"{type(model).__name__} computes its logits in a way that is not known here, so that its loss would be "
                "another one: choose another architecture"
            )

    def kernel_candidates(self, device: torch.device, mixed_precision: str, settings: LanguageModelSettings) -> dict:
        model, kernel = self.causal_lm, settings.attn_implementation
        _check_dtype(model, settings.dtype)
        if self.is_padded:
            return cpu_matmul.add_onednn({"padded": lambda: None}, model, device, mixed_precision)
        length = getattr(model.config.get_text_config(), "max_position_embeddings", 0)
        first = causal_attention(device, mixed_precision, length)
        names = sorted(["sdpa", "eager"] if device.type == "cpu" else [first], key=first.__ne__)
        if device.type == "cuda" and mixed_precision != "no":
            names.append("varlen")
        if _has_attention_dropout(model) or not supports_sdpa(model):
            names, kernel = ["eager"], None  # the others compute such layers as eager does
        names = [kernel] if kernel else names
        candidates = {name: partial(set_text_attention, model, sequences.PREFIX + name) for name in names}
        return cpu_matmul.add_onednn(candidates, model, device, mixed_precision)

    def recompute_activations(self) -> None:
        if not self.causal_lm.supports_gradient_checkpointing:
            super().recompute_activations()
        recompute_activations(self.causal_lm, {"use_reentrant": False, "context_fn": sequences.recomputation})

    def save(self, *arguments: Any) -> tuple[str, dict[str, float], str | None]:
        """Save what was trained; see `saved_causal_lm.save`."""
        return saved_causal_lm.save(self, *arguments)

    @contextlib.contextmanager
    def own_attention(self) -> Iterator[PreTrainedModel]:
        """Let transformers' own attention compute the model within this context, as generating text needs it."""
        model, kernel = self.causal_lm, attention_kernel(self.causal_lm.config)
        own_kernel = "sdpa" if supports_sdpa(model) else "eager"
        set_text_attention(model, kernel if self.is_padded else own_kernel)
        try:
            yield model
        finally:
            set_text_attention(model, kernel)


def _check_dtype(model: PreTrainedModel, dtype: str) -> None:
    """Raise UsageError for a type in which torch cannot compute a model's experts."""
    if dtype == "float64" and any(parameter.ndim == 3 for parameter in model.get_decoder().parameters()):
        raise UsageError(
            f"dtype is float64, but {type(model).__name__} has experts, whose weights torch multiplies in 32 bits or "
            "fewer: set dtype to float32"
        )


def _has_attention_dropout(model: nn.Module) -> bool:
    """Tell whether a layer of attention has a module of dropout with a probability."""
    return any(getattr(getattr(module, "attn_dropout", None), "p", 0) for module in model.modules())


def _find_noise_of_functions(model: PreTrainedModel) -> list[str]:
    """Name the probabilities of dropout in a model's config that no `nn.Dropout` has: functions draw their noise."""
    probabilities = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    fields = model.config.get_text_config().to_dict()
    return [
        name
        for name, value in fields.items()
        if "drop" in name
        and "classifier" not in name
        and isinstance(value, float)
        and value > 0
        and value not in probabilities
    ]


def _find_scale(model: PreTrainedModel) -> tuple[float, float | None]:
    """Return by what the head's product is multiplied, and its soft cap c (logits become c tanh(logits / c)); None: none."""
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    return float(scale), getattr(config, "final_logit_softcapping", None)
