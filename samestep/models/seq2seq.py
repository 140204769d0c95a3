"""Train a model of transformers that has an encoder and a decoder: cross-entropy summed over the targets of a micro-batch.

Sources and targets are padded behind their tokens. The decoder's inputs are the targets, shifted by the model's own rule. Of
the logits, which have a row for each target, only a part exists at any time.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, PreTrainedConfig, PreTrainedModel

from samestep._internals.torch_tracing import is_fake
from samestep._internals.transformers_models import recompute_activations, shift_right, supports_sdpa
from samestep.cut.layout import round_up
from samestep.errors import UsageError, reason
from samestep.models import adapters, cpu_matmul, saved_seq2seq
from samestep.models.dropout_by_call import Calls, DropoutByCall, call_functions
from samestep.models.pretrained import initial_model
from samestep.models.summed_losses import SummedLosses
from samestep.recipe.task_settings import Seq2SeqSettings
from samestep.recipe.tasks.seq2seq_finetuning import Seq2SeqFineTuning
from samestep.step import losses, noise

NAMES: dict[str, tuple[tuple[str, ...], ...]] = {
    "hidden_size": (("d_model",),),
    "num_hidden_layers": (("encoder_layers",), ("num_layers",)),
    "num_decoder_layers": (("decoder_layers",), ("num_decoder_layers",)),
    "num_attention_heads": (("encoder_attention_heads", "decoder_attention_heads"), ("num_heads",)),
    "intermediate_size": (("encoder_ffn_dim", "decoder_ffn_dim"), ("d_ff",)),
    "max_position_embeddings": (("max_position_embeddings",), ("max_target_positions",)),
    "tie_word_embeddings": (("tie_word_embeddings",),),
    "initializer_range": (("init_std",),),
}
"""Field of a recipe -> its names in configs, those of one kind of config together."""
LAYER_DROP = ("encoder_layerdrop", "decoder_layerdrop")
"""Fields of a config: probability of leaving out a layer, for all samples of a forward."""


def build_model(recipe: Seq2SeqFineTuning, source: Any = None) -> tuple[PreTrainedModel, list[str]]:
    """Build a recipe's model in float32, and say in lines what of its configuration is not as it was.

    Args:
        recipe: decides the shape, or the weights to start from.
        source: with a `tokenizer`, whose tokens the vocabulary must hold; None: the recipe decides.

    Raises:
        UsageError: no such architecture, or weights that cannot be loaded; too few tokens or positions.
    """
    tokenizer, path = getattr(source, "tokenizer", None), adapters.find_start(recipe)[0]
    name = f"architecture {recipe.architecture}" if path is None else f"model_name_or_path {path}"
    try:
        config = make_config(recipe, tokenizer) if path is None else AutoConfig.from_pretrained(path)
    except UsageError:
        raise
    except Exception as error:  # of any kind: network, names, files of others, rules of architectures
        raise UsageError(f"{name} gives no configuration: {reason(error)}. Give another one") from None
    notes = _choose_dropout(config, recipe.dropout)
    _check_lengths(recipe, config)
    kind = AutoModelForSpeechSeq2Seq if recipe.modality == "speech" else AutoModelForSeq2SeqLM
    try:
        model = kind.from_config(config) if path is None else initial_model(kind, config, path)
    except ValueError as error:
        raise UsageError(f"{name} has no encoder with a decoder behind it: {reason(error)}. Give another one") from None
    if model.config.decoder_start_token_id is None and model.config.model_type != "mbart":
        raise UsageError(f"{name} has no decoder_start_token_id in its config.json, with which targets begin: add it")
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    if tokenizer is not None and len(tokenizer) > num_embeddings:
        raise UsageError(
            f"the tokenizer has {len(tokenizer):,} tokens, but the model embeds {num_embeddings:,}: give the model's own "
            "tokenizer_name, or a larger vocab_size"
        )
    call_functions(model)
    return model, notes


def make_config(recipe: Seq2SeqFineTuning, tokenizer: Any = None) -> PreTrainedConfig:
    """Make the configuration of a model with random weights, of an architecture and a recipe's shape."""
    try:
        default = AutoConfig.for_model(recipe.architecture)
    except ValueError:
        raise UsageError(
            f"architecture {recipe.architecture} is no model_type that transformers knows, such as t5"
        ) from None
    fields = {name: value for name, value in recipe.shape.items() if value is not None}
    fields.setdefault("num_decoder_layers", recipe.num_hidden_layers)
    values: dict[str, Any] = {}
    for name, value in fields.items():
        own = next((own for own in NAMES[name] if all(hasattr(default, each) for each in own)), None)
        if own is None:
            raise UsageError(
                f"{name} is {value}, but architecture {recipe.architecture} has no such field: set it to null"
            )
        values |= dict.fromkeys(own, value)
    if hasattr(default, "d_kv"):
        values["d_kv"] = fields["hidden_size"] // fields["num_attention_heads"]
    if hasattr(default, "max_source_positions"):
        values["max_source_positions"] = recipe.max_source_length
    if tokenizer is None:
        return AutoConfig.for_model(recipe.architecture, **values, vocab_size=recipe.vocab_size)
    values["vocab_size"] = max(recipe.vocab_size or 0, len(tokenizer))
    values |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    starts_with_end = getattr(default, "decoder_start_token_id", None) == default.eos_token_id
    values["decoder_start_token_id"] = tokenizer.eos_token_id if starts_with_end else tokenizer.pad_token_id
    if getattr(default, "forced_eos_token_id", None) is not None:
        values["forced_eos_token_id"] = tokenizer.eos_token_id
    return AutoConfig.for_model(recipe.architecture, **values)


def _choose_dropout(config: PreTrainedConfig, probability: float | None) -> list[str]:
    """Set all dropout of a configuration (None: leave it), and leave no layers out; say so in lines."""
    notes = []
    if getattr(config, "apply_spec_augment", False):
        config.apply_spec_augment = False
        notes.append("apply_spec_augment is set to false: it draws parts of spectrograms for a whole micro-batch")
    for name, value in config.to_dict().items():
        if name in LAYER_DROP and value:
            setattr(config, name, 0.0)
            notes.append(
                f"{name} {value} is set to 0: it leaves out a layer for all samples of a forward, however it is cut"
            )
        elif probability is not None and "drop" in name and name not in LAYER_DROP and isinstance(value, float):
            setattr(config, name, probability)
    return notes


def _check_lengths(recipe: Seq2SeqFineTuning, config: PreTrainedConfig) -> None:
    """Raise UsageError where a text may be longer than the positions of a model."""
    problems, is_speech = [], hasattr(config, "max_source_positions")
    if is_speech is not (recipe.modality == "speech"):
        kind = "recordings" if is_speech else "texts"
        raise UsageError(
            f"modality is {recipe.modality}, but sources of a model of type {config.model_type} are {kind}: set it"
        )
    names = {"max_target_length": "max_target_positions" if is_speech else "max_position_embeddings"}
    names |= {} if is_speech else {"max_source_length": "max_position_embeddings"}
    for field, name in names.items():
        length, limit = getattr(recipe, field), getattr(config, name, None)
        if limit is not None and length > limit:
            problems.append(f"{field} is {length:,}, but the model has {limit:,} positions: lower it to at most that")
    if problems:
        raise UsageError(problems)


class Seq2SeqSums(SummedLosses):
    """Sums the cross-entropy of targets, given their sources and the tokens before them.

    With label smoothing e a target y adds (1 - e) (-log p_y) + e times the mean over the vocabulary of -log p, as torch and
    transformers define it. Evaluations have none.

    Args:
        model: of transformers, or peft's model of it.
        label_smoothing: e.

    Attributes:
        notes: lines for the log.
    """

    def __init__(self, model: nn.Module, label_smoothing: float = 0.0):
        super().__init__()
        self.model, self.label_smoothing = model, label_smoothing
        own = self.seq2seq
        layers = {type(module).__name__ for module in own.modules()}
        self._no_split_modules = tuple(sorted(layers & set(own._no_split_modules or ())))
        self.notes: list[str] = []
        drops = [v for name, v in own.config.to_dict().items() if "drop" in name and "classifier" not in name]
        self.is_noisy = any(isinstance(value, float) and value > 0 for value in drops)
        # Exchanged for one by sample, which has the noise for all calls
        self.noise_of_calls = nn.Dropout(max((value for value in drops if isinstance(value, float)), default=0.0))
        self.calls = Calls(self.model) if self.is_noisy else None
        if self.is_noisy:
            own.set_attn_implementation("eager")  # other kernels draw dropout of their own
        self._has_bias: bool | None = None
        if not is_fake(next(model.parameters())):
            self._check_head()

    @property
    def seq2seq(self) -> PreTrainedModel:
        """The model of transformers, with adapters in it if there are any."""
        return self.model if isinstance(self.model, PreTrainedModel) else self.model.get_base_model()

    @classmethod
    def from_recipe(cls, recipe: Seq2SeqFineTuning, source: Any = None) -> Self:
        model: Any
        model, notes = build_model(recipe, source)
        if source is not None:
            saved_seq2seq.choose_generation(model, source)
        if recipe.lora_rank is not None:
            model = adapters.add_lora(model, recipe)
        sums = cls(model, recipe.label_smoothing)
        sums.notes = [*notes, *sums.notes]
        return sums

    @classmethod
    def example(cls, recipe: Seq2SeqFineTuning, num_samples: int) -> dict[str, torch.Tensor | None]:
        source: torch.Tensor = torch.zeros(num_samples, recipe.max_source_length, dtype=torch.int64)
        mask: torch.Tensor | None = torch.ones_like(source)
        if recipe.modality == "speech":
            source, mask = torch.zeros(num_samples, 80, 2 * recipe.max_source_length), None
        labels = torch.zeros(num_samples, recipe.max_target_length, dtype=torch.int64)
        label_index = torch.arange(labels.numel())
        return {"source": source, "source_mask": mask, "labels": labels, "label_index": label_index}

    def forward(self, source, labels, label_index, source_mask=None) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the loss of targets, and count those that are predicted right, when evaluating; both [1].

        Args:
            source: int64 [S, T], tokens; of speech floating [S, bins, frames], spectrograms.
            labels: int64 [S, T'].
            label_index: int64 [m], place of each target in `labels`, flattened.
            source_mask: int64 [S, T], 1 for tokens, 0 for padding; None of speech.
        """
        if self.calls is not None:
            self.calls.frames.clear()
        with self._by_sample():
            hidden = self._decode(source, source_mask, labels)
        hidden, targets = hidden.flatten(0, 1)[label_index], labels.flatten()[label_index]
        weight = self.seq2seq.get_output_embeddings().weight
        if self._find_bias():  # as the product with a 1 behind each row
            hidden = F.pad(hidden, (0, 1), value=1.0)
            weight = torch.cat([weight, self.seq2seq.final_logits_bias.to(weight).T], 1)
        num_spare = round_up(len(targets), 6) - len(targets)  # few sizes in a run
        hidden = F.pad(hidden, (0, 0, 0, num_spare))
        padded = F.pad(targets, (0, num_spare), value=losses.IGNORED)
        sums, correct = losses.linear_cross_entropy(hidden, weight, padded, losses.choose_max_logits(weight))
        if self.label_smoothing and self.training:
            sums = sums + self.label_smoothing * _find_lead(hidden[: len(targets)], weight, targets)
        return torch.stack([sums]), correct[None]

    def _decode(self, source: torch.Tensor, source_mask: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
        """Compute the last hidden states of the decoder as the head takes them, [S, T', width]."""
        model, dtype = self.seq2seq, next(self.parameters()).dtype
        source = source.to(dtype) if source.is_floating_point() else source
        encoded = model.get_encoder()(**{model.main_input_name: source}, attention_mask=source_mask).last_hidden_state
        mask = {} if source_mask is None else {"encoder_attention_mask": source_mask}
        inputs = {"input_ids": shift_right(model, labels), "encoder_hidden_states": encoded, **mask}
        decoded = model.get_decoder()(**inputs, use_cache=False)
        hidden = decoded.last_hidden_state
        is_scaled = getattr(model.config, "scale_decoder_outputs", False)  # T5 and its kin
        return hidden * model.config.d_model**-0.5 if is_scaled else hidden

    def _find_bias(self) -> bool:
        """Tell whether logits have a bias that is not 0; asked once, as a device has to be waited for."""
        if self._has_bias is None:
            bias = getattr(self.seq2seq, "final_logits_bias", None)
            self._has_bias = bias is not None and not is_fake(bias) and bool(bias.any())
        return self._has_bias

    def _by_sample(self) -> contextlib.AbstractContextManager:
        """Let all dropout be drawn by sample within this context."""
        own = self.noise_of_calls
        if self.calls is None or not self.training or not isinstance(own, noise.Dropout):
            return contextlib.nullcontext()
        return DropoutByCall(self.calls, own.noise, self.calls.find_frame())

    @torch.no_grad()
    def _check_head(self) -> None:
        """Compare the loss of a few tokens with that of the model's own logits.

        Raises:
            UsageError: they differ.
        """
        model, was_training = self.seq2seq, self.training
        self.eval()
        labels = torch.arange(1, 5, device=model.device)[None]
        source, mask = labels, torch.ones_like(labels)
        if model.main_input_name == "input_features":
            frames = 2 * model.config.max_source_positions
            source, mask = (
                torch.zeros(1, model.config.num_mel_bins, frames, device=model.device, dtype=model.dtype),
                None,
            )
        head = model.get_output_embeddings()
        problem = "has no linear head" if type(head) is not nn.Linear or head.bias is not None else None
        if problem is None:
            ours = self(source, labels, torch.arange(labels.numel(), device=model.device), mask)[0][0]
            logits = model(
                **{model.main_input_name: source},
                attention_mask=mask,
                decoder_input_ids=shift_right(model, labels),
                use_cache=False,
            ).logits
            theirs = losses.cross_entropy_sum(logits[0], labels[0])
            problem = None if torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4) else "computes its logits otherwise"
        self.train(was_training)
        if problem:
            raise UsageError(
                f"{type(model).__name__} {problem}, in a way that is not known here, so that its loss would be another one: "
                "choose another model"
            )

    def kernel_candidates(
        self, device: torch.device, mixed_precision: str, settings: Seq2SeqSettings
    ) -> dict[str, Callable[[], object]]:
        model = self.seq2seq
        if self.is_noisy or not supports_sdpa(model):
            candidates: dict[str, Callable[[], object]] = {"eager": lambda: None}
        else:
            name = settings.attn_implementation or "sdpa"
            candidates = {name: partial(model.set_attn_implementation, name)}
        return cpu_matmul.add_onednn(candidates, model, device, mixed_precision)

    def recompute_activations(self) -> None:
        if not self.seq2seq.supports_gradient_checkpointing:
            super().recompute_activations()
        options = {"use_reentrant": False, "context_fn": self._recompute}
        recompute_activations(self.seq2seq, options)

    def _recompute(self) -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
        """Return the contexts of a layer's forward, which runs now, and of its recomputation in the backward."""
        return contextlib.nullcontext(), self._by_sample()

    def compile_layers(self) -> None:
        if self.is_noisy:
            raise UsageError(
                f"torch_compile is true, but {type(self.seq2seq).__name__} calls dropout by a function, which is drawn by "
                "sample outside of compiled code. Leave it out, or set dropout to 0"
            )
        super().compile_layers()

    def save(self, *arguments: Any) -> str:
        """Save what was trained; see `saved_seq2seq.save`."""
        return saved_seq2seq.save(self, *arguments)


def _find_lead(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum, over targets, the target's logit less the mean logit: what smoothing adds to the cross-entropy, divided by e.

    With z the logits, -log p_y = logsumexp z - z_y, and the mean of -log p is logsumexp z - mean z.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    device = hidden.device.type
    with torch.autocast(device, enabled=False):
        weight = weight.to(wide)
        return (hidden.to(wide) * (F.embedding(targets, weight) - weight.mean(0))).sum()
